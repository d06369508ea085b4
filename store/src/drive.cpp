#include "drive.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "reader.h"

namespace k3::store {

namespace {

void sleep_ns(uint64_t ns) {
    timespec left = {static_cast<time_t>(ns / 1000000000u), static_cast<long>(ns % 1000000000u)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

}  // namespace

Drive::Drive(uint32_t depth, uint32_t background, Files& files, Faults& faults, ReadDone done)
    : files_(files), faults_(faults), done_(std::move(done)), background_max_(background) {
    try {
        for (uint32_t i = 0; i < depth; ++i) threads_.emplace_back(&Drive::serve, this);
    } catch (...) {
        stop();
        throw;
    }
}

void Drive::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    more_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

bool Drive::push(const std::vector<Read*>& reads, const Job& job, bool first) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Both are looked at under the lock: promote() and take_back() come after they were changed, so either they
    // find these reads in the queue, or the change is seen here.
    if (job.called_off.load(std::memory_order_relaxed)) return false;
    ReadQueue& queue = job.demand.load(std::memory_order_relaxed) ? demand_ : background_;
    if (first) {
        for (auto read = reads.rbegin(); read != reads.rend(); ++read) queue.push_front(**read);
    } else {
        for (Read* read : reads) queue.push_back(*read);
    }
    more_.notify_all();
    return true;
}

void Drive::promote(std::vector<Read>& reads) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Read& read : reads) {
        if (read.queue != &background_) continue;
        background_.remove(read);
        demand_.push_back(read);
    }
    more_.notify_all();  // a thread that was one too many for the background
}

void Drive::take_back(std::vector<Read>& reads, std::vector<Read*>& taken) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Read& read : reads) {
        if (!is_queued(read)) continue;
        read.queue->remove(read);
        taken.push_back(&read);
    }
}

uint64_t Drive::queued() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return demand_.size() + background_.size();
}

uint64_t Drive::busy_ns() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return busy_ns_ + (in_flight_.load(std::memory_order_relaxed) > 0 ? now_ns() - busy_since_ns_ : 0);
}

uint64_t Drive::oldest_read_ns() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return in_progress_.empty() ? 0 : now_ns() - in_progress_.front()->began_ns;
}

void Drive::serve() {
    block_signals();
    Bounce bounce;
    while (true) {
        Read* read = nullptr;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            more_.wait(lock, [&] { return stopping_ || (read = next()) != nullptr; });
            if (read == nullptr) return;
        }
        ended(*read, run(*read, bounce));
    }
}

Read* Drive::next() {
    if (stopping_) return nullptr;
    const bool background = demand_.empty();
    if (background && (background_.empty() || background_in_flight_ >= background_max_)) return nullptr;
    ReadQueue& queue = background ? background_ : demand_;
    Read* read = queue.front();
    queue.remove(*read);
    read->in_background = background;
    background_in_flight_ += background;
    in_progress_.push_back(*read);
    read->began_ns = now_ns();
    if (in_flight_.fetch_add(1, std::memory_order_relaxed) == 0) busy_since_ns_ = read->began_ns;
    return read;
}

int Drive::run(Read& read, Bounce& bounce) {
    try {
        read.is_open = false;
        std::shared_ptr<OpenFile> file = files_.open(read.file);
        read.is_open = true;
        Progress progress(read, std::move(file), read.chunk.into == nullptr ? bounce.get() : nullptr, faults_);
        if (!progress.direct()) counters.direct.store(false, std::memory_order_relaxed);
        while (progress.prepare()) {
            const ssize_t count = ::pread(progress.fd(), progress.target(), progress.length(),
                                          static_cast<off_t>(progress.position()));
            if (!progress.advance(count < 0 ? -errno : count)) break;
        }
        return progress.error();
    } catch (const std::system_error& error) {
        return error.code().value();
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    }
}

void Drive::ended(Read& read, int error) {
    const uint64_t began_ns = read.began_ns;  // nobody changes it while the read is in progress
    if (rate_.load(std::memory_order_relaxed) != 0) wait_for_rate(read.chunk.need, began_ns);
    const uint64_t end_ns = now_ns();
    counters.reads.fetch_add(1, std::memory_order_relaxed);
    counters.read_ns.fetch_add(end_ns - began_ns, std::memory_order_relaxed);
    const auto bound = std::lower_bound(std::begin(kReadBoundsNs), std::end(kReadBoundsNs), end_ns - began_ns);
    counters.read_classes[bound - std::begin(kReadBoundsNs)].fetch_add(1, std::memory_order_relaxed);
    if (error == 0) counters.read_bytes.fetch_add(read.chunk.need, std::memory_order_relaxed);
    counters.extent_bytes.fetch_add(read.chunk.extent_bytes(), std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        in_progress_.remove(read);
        background_in_flight_ -= read.in_background;
        if (in_flight_.fetch_sub(1, std::memory_order_relaxed) == 1) busy_ns_ += end_ns - busy_since_ns_;
    }
    done_(read, error);  // the job may be gone after this
}

void Drive::wait_for_rate(uint64_t bytes, uint64_t began_ns) {
    uint64_t until_ns;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const double ns = 1e9 * static_cast<double>(bytes) / static_cast<double>(rate_.load());
        rate_free_ns_ = std::max(rate_free_ns_, began_ns) + static_cast<uint64_t>(ns);
        until_ns = rate_free_ns_;
    }
    const uint64_t now = now_ns();
    if (until_ns > now) sleep_ns(until_ns - now);
}

Progress::Progress(Read& read, std::shared_ptr<OpenFile> file, uint8_t* bounce, Faults& faults)
    : read_(read),
      file_(std::move(file)),
      into_(read.chunk.into != nullptr ? read.chunk.into : bounce),
      faults_(faults) {}

bool Progress::prepare() {
    const uint64_t end = file_->direct() ? read_.chunk.ask : read_.chunk.need;
    length_ = end - done_;
    fault_ = faults_.next(read_.file, position(), length_);
    if (fault_.stall_ms != 0) faults_.stall(fault_);
    error_ = fault_.error;
    return error_ == 0;
}

bool Progress::advance(int64_t result) {
    if (result == -EINTR || result == -EAGAIN) return true;
    if (result < 0) {
        error_ = static_cast<int>(-result);
        return false;
    }
    if (result == 0) {
        error_ = ENODATA;  // the file ends here
        return false;
    }
    result =
        static_cast<int64_t>(std::min(static_cast<uint64_t>(result), std::max<uint64_t>(1, fault_.shorten_to)));
    if (fault_.flip) target()[fault_.flip_at % static_cast<uint64_t>(result)] ^= 0x10;
    const uint64_t before = done_;
    done_ += static_cast<uint64_t>(result);
    const Chunk& chunk = read_.chunk;
    if (done_ < chunk.need && file_->direct() && done_ % kPage != 0) {
        // A short direct read may stop anywhere; go back to the page, or leave O_DIRECT for one page.
        const uint64_t page = done_ / kPage * kPage;
        done_ = page;
        if (page <= before) finish_page_buffered(page);
    }
    if (error_ != 0) return false;
    if (done_ < chunk.need) return true;
    // After the bytes are there: what changes from now on does not change them.
    if (read_.version != 0 && (read_.version != file_->version || !file_->is_unchanged())) {
        error_ = kFileChanged;
        return false;
    }
    if (chunk.into == nullptr) std::memcpy(chunk.copy_to, into_ + chunk.skip, chunk.copy_bytes);
    return false;
}

void Progress::finish_page_buffered(uint64_t page) {
    const uint64_t stop = std::min(read_.chunk.need, page + kPage);
    while (done_ < stop) {
        const ssize_t count = file_->read_buffered(target(), stop - done_, position());
        if (count <= 0) {
            error_ = count < 0 ? errno : ENODATA;
            return;
        }
        done_ += static_cast<uint64_t>(count);
    }
}

Bounce::~Bounce() { std::free(memory_); }

uint8_t* Bounce::get() {
    if (memory_ == nullptr) memory_ = static_cast<uint8_t*>(std::aligned_alloc(kPage, kChunkBytes + kPage));
    if (memory_ == nullptr) throw std::bad_alloc();
    return memory_;
}

}  // namespace k3::store
