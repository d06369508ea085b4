// The files that experts are read from: a bounded number of them open, the longest unused closed first.
//
// A container has one expert file per layer and root, hundreds in all, and a process may have as few as 64
// descriptors. An open file is shared by its readers and closed when the last of them lets go. Thread-safe.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"

namespace k3::store {

// By which a file is known again: another one at its path, or a change of this one, differs in one of these.
struct FileIdentity {
    uint64_t device, inode, bytes;
    int64_t modified_s, modified_ns;
    bool operator==(const FileIdentity& other) const {
        return device == other.device && inode == other.inode && bytes == other.bytes &&
               modified_s == other.modified_s && modified_ns == other.modified_ns;
    }
};

// One file, open. `fd` reads past the page cache when `direct`.
class OpenFile {
public:
    // With `probe`, a read of a page decides about `direct`: opening alone proves nothing. std::system_error;
    // EINVAL for what is no regular file.
    OpenFile(std::string path, bool direct, bool probe = false);
    int fd() const { return fd_.get(); }
    bool direct() const { return direct_; }
    const FileIdentity& identity() const { return identity_; }  // as it was when it was opened
    bool is_unchanged() const;
    // Which of the files that were at its path this is: numbered by Files from 1, before anybody else has it.
    uint64_t version = 1;
    // Reads through the page cache, for the rest of a page where a direct read stood still. Opened for each use.
    ssize_t read_buffered(uint8_t* into, size_t bytes, uint64_t offset) const;

private:
    std::string path_;
    bool direct_;
    Fd fd_;
    FileIdentity identity_;
};

class Files {
public:
    explicit Files(uint32_t limit) : limit_(limit) {}

    // Registers a file and opens it once to see that it can be. Returns its number. std::system_error.
    uint32_t add(uint32_t root, const std::string& path, bool direct);

    // Registers a file that is opened when it is first read, past the page cache if its file system can.
    uint32_t declare(uint32_t root, const std::string& path, bool direct);

    // The file, open. std::system_error.
    std::shared_ptr<OpenFile> open(uint32_t file);

    // Forget the open file, so that the next read opens whatever is at its path then.
    void drop(uint32_t file);

    // Forget them all.
    void close();

    std::vector<uint64_t> sizes() const;  // of all files, when they were added
    // How often the file was found to be another one when it was opened, or changed, and once more.
    uint64_t version(uint32_t file) const;
    uint32_t open_count() const;
    uint32_t root(uint32_t file) const;
    // Of the files that were opened so far, in their order: past the page cache, or not.
    std::vector<std::pair<uint32_t, bool>> opened() const;
    // How many files were to be read past the page cache and could not be.
    uint32_t refused_direct() const { return refused_direct_.load(std::memory_order_relaxed); }

private:
    struct Entry {
        uint32_t root;
        std::string path;
        bool direct;
        bool probe;  // `direct` is to be found out
        bool was_opened;
        FileIdentity identity;  // of the version
        uint64_t version;
        std::shared_ptr<OpenFile> open;
        std::list<uint32_t>::iterator at;  // in order_, while open
    };

    void close_beyond(size_t limit);

    uint32_t limit_;
    mutable std::mutex mutex_;
    std::vector<Entry> entries_;
    std::list<uint32_t> order_;  // open ones, longest unused first
    std::atomic<uint32_t> refused_direct_{0};
};

}  // namespace k3::store
