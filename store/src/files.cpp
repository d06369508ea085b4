#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <new>
#include <utility>

#include "layout.h"

namespace k3::store {

namespace {

struct stat about(int fd, const std::string& path) {
    struct stat status;
    if (::fstat(fd, &status) != 0) refuse(errno, "cannot look at " + path);
    return status;
}

Fd open_for_reading(const std::string& path, bool direct) {
    Fd fd;
    do {
        // Not blocking: what lies there may be a pipe by now, and opening one waits for its writer.
        fd = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | (direct ? O_DIRECT : 0)));
    } while (!fd.valid() && errno == EINTR);
    if (!fd.valid()) refuse(errno, "cannot open " + path);
    if (!S_ISREG(about(fd.get(), path).st_mode)) refuse(EINVAL, path + " is no regular file");
    const int flags = ::fcntl(fd.get(), F_GETFL);
    if (flags < 0 || ::fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) refuse(errno, "cannot set up " + path);
    return fd;
}

// Errors of a file system that lacks a feature; a failing drive answers with others.
bool is_not_supported(int error) {
    return error == EINVAL || error == EOPNOTSUPP || error == ENOTSUP || error == ENOSYS || error == ENOTTY;
}

// Past the page cache where a read of the first page shows that it can be; `direct` says so afterwards.
Fd open_probed(const std::string& path, bool& direct) {
    int error = 0;
    try {
        Fd fd = open_for_reading(path, true);
        const std::unique_ptr<void, decltype(&std::free)> page(std::aligned_alloc(kPage, kPage), &std::free);
        if (!page) throw std::bad_alloc();
        ssize_t count;
        do {
            count = ::pread(fd.get(), page.get(), kPage, 0);
        } while (count < 0 && errno == EINTR);
        if (count >= 0) return fd;
        error = errno;
    } catch (const std::system_error& refused) {
        error = refused.code().value();
    }
    if (!is_not_supported(error)) refuse(error, "cannot open " + path);
    direct = false;
    return open_for_reading(path, false);
}

FileIdentity identity_of(int fd, const std::string& path) {
    const struct stat status = about(fd, path);
    return {status.st_dev, status.st_ino, static_cast<uint64_t>(status.st_size), status.st_mtim.tv_sec,
            status.st_mtim.tv_nsec};
}

}  // namespace

OpenFile::OpenFile(std::string path, bool direct, bool probe)
    : path_(std::move(path)),
      direct_(direct),
      fd_(direct && probe ? open_probed(path_, direct_) : open_for_reading(path_, direct)),
      identity_(identity_of(fd_.get(), path_)) {}

bool OpenFile::is_unchanged() const { return identity_of(fd_.get(), path_) == identity_; }

ssize_t OpenFile::read_buffered(uint8_t* into, size_t bytes, uint64_t offset) const {
    try {
        const Fd fd = open_for_reading(path_, false);
        const FileIdentity found = identity_of(fd.get(), path_);
        if (found.device != identity_.device || found.inode != identity_.inode) {
            errno = ESTALE;  // another file by now: half a page of each would be neither's
            return -1;
        }
        return ::pread(fd.get(), into, bytes, static_cast<off_t>(offset));
    } catch (const std::system_error& error) {
        errno = error.code().value();
        return -1;
    }
}

uint32_t Files::add(uint32_t root, const std::string& path, bool direct) {
    auto open = std::make_shared<OpenFile>(path, direct);
    std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t file = static_cast<uint32_t>(entries_.size());
    close_beyond(limit_ - 1);
    const FileIdentity identity = open->identity();
    entries_.push_back(
        {root, path, direct, false, true, identity, 1, std::move(open), order_.insert(order_.end(), file)});
    return file;
}

uint32_t Files::declare(uint32_t root, const std::string& path, bool direct) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back({root, path, direct, true, false, {}, 1, nullptr, {}});
    return static_cast<uint32_t>(entries_.size() - 1);
}

std::shared_ptr<OpenFile> Files::open(uint32_t file) {
    std::unique_lock<std::mutex> lock(mutex_);
    Entry& entry = entries_[file];
    if (entry.open) {
        order_.splice(order_.end(), order_, entry.at);
        return entry.open;
    }
    close_beyond(limit_ - 1);
    const std::string path = entry.path;
    const bool direct = entry.direct, probe = entry.probe;
    lock.unlock();  // opening may take a while; two threads may open the same file, one of the two is then let go
    auto open = std::make_shared<OpenFile>(path, direct, probe);
    lock.lock();
    Entry& again = entries_[file];
    if (!again.open) {
        if (direct && !open->direct()) {
            again.direct = false;
            refused_direct_.fetch_add(1, std::memory_order_relaxed);
        }
        if (!again.was_opened) {
            again.was_opened = true;
            again.identity = open->identity();
        } else if (!(open->identity() == again.identity)) {
            again.identity = open->identity();
            ++again.version;
        }
        open->version = again.version;
        again.open = std::move(open);
        again.at = order_.insert(order_.end(), file);
        close_beyond(limit_);
    }
    return again.open;
}

void Files::drop(uint32_t file) {
    std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = entries_[file];
    if (!entry.open) return;
    order_.erase(entry.at);
    entry.open.reset();
}

void Files::close() {
    std::lock_guard<std::mutex> lock(mutex_);
    close_beyond(0);
}

void Files::close_beyond(size_t limit) {
    while (order_.size() > limit) {
        entries_[order_.front()].open.reset();
        order_.pop_front();
    }
}

std::vector<uint64_t> Files::sizes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<uint64_t> sizes;
    for (const Entry& entry : entries_) sizes.push_back(entry.identity.bytes);
    return sizes;
}

uint64_t Files::version(uint32_t file) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return entries_[file].version;
}

std::vector<std::pair<uint32_t, bool>> Files::opened() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::pair<uint32_t, bool>> found;
    for (uint32_t file = 0; file < entries_.size(); ++file) {
        if (entries_[file].was_opened) found.emplace_back(file, entries_[file].direct);
    }
    return found;
}

uint32_t Files::open_count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<uint32_t>(order_.size());
}

uint32_t Files::root(uint32_t file) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return entries_[file].root;
}

}  // namespace k3::store
