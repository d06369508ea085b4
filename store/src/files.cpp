#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

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
    // io_uring takes the flag at its word and answers EAGAIN.
    const int flags = ::fcntl(fd.get(), F_GETFL);
    if (flags < 0 || ::fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) refuse(errno, "cannot set up " + path);
    return fd;
}

FileIdentity identity_of(int fd, const std::string& path) {
    const struct stat status = about(fd, path);
    return {status.st_dev, status.st_ino, static_cast<uint64_t>(status.st_size), status.st_mtim.tv_sec,
            status.st_mtim.tv_nsec};
}

}  // namespace

OpenFile::OpenFile(std::string path, bool direct)
    : path_(std::move(path)),
      direct_(direct),
      fd_(open_for_reading(path_, direct)),
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
    entries_.push_back({root, path, direct, identity, 1, std::move(open), order_.insert(order_.end(), file)});
    return file;
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
    const bool direct = entry.direct;
    lock.unlock();  // opening may take a while; two threads may open the same file, one of the two is then let go
    auto open = std::make_shared<OpenFile>(path, direct);
    lock.lock();
    Entry& again = entries_[file];
    if (!again.open) {
        if (!(open->identity() == again.identity)) {
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

uint32_t Files::open_count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<uint32_t>(order_.size());
}

uint32_t Files::root(uint32_t file) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return entries_[file].root;
}

}  // namespace k3::store
