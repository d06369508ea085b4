#include "files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace k3::store {

namespace {

Fd open_for_reading(const std::string& path, bool direct) {
    Fd fd;
    do {
        fd = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0)));
    } while (!fd.valid() && errno == EINTR);
    if (!fd.valid()) refuse(errno, "cannot open " + path);
    return fd;
}

}  // namespace

OpenFile::OpenFile(std::string path, bool direct)
    : path_(std::move(path)), direct_(direct), fd_(open_for_reading(path_, direct)) {}

ssize_t OpenFile::read_buffered(uint8_t* into, size_t bytes, uint64_t offset) const {
    try {
        const Fd fd = open_for_reading(path_, false);
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
    entries_.push_back({root, path, direct, std::move(open), order_.insert(order_.end(), file)});
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
        again.open = open;
        again.at = order_.insert(order_.end(), file);
        close_beyond(limit_);
    }
    return again.open ? again.open : open;
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

uint32_t Files::size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<uint32_t>(entries_.size());
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
