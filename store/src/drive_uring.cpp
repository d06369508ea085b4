// A drive as one thread that drives an io_uring, by plain system calls.
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "drive.h"

namespace k3::store {

namespace {

int sys_setup(unsigned entries, io_uring_params* params) {
    return static_cast<int>(::syscall(SYS_io_uring_setup, entries, params));
}

int sys_enter(int fd, unsigned submit, unsigned wait) {
    return static_cast<int>(::syscall(SYS_io_uring_enter, fd, submit, wait, wait > 0 ? IORING_ENTER_GETEVENTS : 0u,
                                      nullptr, size_t{0}));
}

// The mapped queues. One thread only; the kernel is the other side, hence acquire and release.
class Uring {
public:
    explicit Uring(unsigned entries) {
        io_uring_params params{};
        fd_ = Fd(sys_setup(entries, &params));
        if (!fd_.valid()) refuse(errno, "io_uring_setup");
        const uint64_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const uint64_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        sq_ = map(IORING_OFF_SQ_RING, sq_bytes);
        cq_ = map(IORING_OFF_CQ_RING, cq_bytes);
        sqe_ = map(IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe));
        sq_tail_ = at<unsigned>(sq_, params.sq_off.tail);
        sq_mask_ = *at<unsigned>(sq_, params.sq_off.ring_mask);
        sq_array_ = at<unsigned>(sq_, params.sq_off.array);
        cq_head_ = at<unsigned>(cq_, params.cq_off.head);
        cq_tail_ = at<unsigned>(cq_, params.cq_off.tail);
        cq_mask_ = *at<unsigned>(cq_, params.cq_off.ring_mask);
        cqes_ = at<io_uring_cqe>(cq_, params.cq_off.cqes);
        try_it();
    }
    ~Uring() { unmap(); }

    // Never more than `entries` between two submits: the callers have at most that many operations.
    void queue(const io_uring_sqe& entry) {
        const unsigned tail = *sq_tail_;
        static_cast<io_uring_sqe*>(sqe_)[tail & sq_mask_] = entry;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
        ++unsubmitted_;
    }

    // Submits what was queued and waits until something is complete. Returns an errno or 0.
    int submit_and_wait() {
        while (true) {
            const int taken = sys_enter(fd_.get(), unsubmitted_, 1);
            if (taken >= 0) {
                unsubmitted_ -= static_cast<unsigned>(taken);
                if (unsubmitted_ == 0) return 0;
            } else if (errno == EAGAIN || errno == EBUSY) {
                return 0;  // short of memory or completions to be taken first: come again
            } else if (errno != EINTR) {
                return errno;
            }
        }
    }

    int fd() const { return fd_.get(); }

    // What was queued and the kernel has not taken: it never will. Returns the operations' user data.
    std::vector<uint64_t> take_back() {
        std::vector<uint64_t> data;
        const unsigned tail = *sq_tail_ - unsubmitted_;
        for (unsigned i = 0; i < unsubmitted_; ++i) {
            data.push_back(static_cast<io_uring_sqe*>(sqe_)[(tail + i) & sq_mask_].user_data);
        }
        __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
        unsubmitted_ = 0;
        return data;
    }

    bool take(io_uring_cqe& entry) {
        const unsigned head = *cq_head_;
        if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
        entry = cqes_[head & cq_mask_];
        __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
        return true;
    }

private:
    struct Area {
        void* memory;
        size_t bytes;
    };

    void* map(uint64_t where, uint64_t bytes) {
        void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(),
                              static_cast<off_t>(where));
        if (memory == MAP_FAILED) {
            const int error = errno;
            unmap();
            refuse(error, "mapping an io_uring");
        }
        areas_.push_back({memory, bytes});
        return memory;
    }

    void unmap() {
        for (const Area& area : areas_) ::munmap(area.memory, area.bytes);
        areas_.clear();
    }

    // One operation that does nothing: a filter may let the ring be made and refuse its use.
    void try_it() {
        queue({});
        int taken;
        do {
            taken = sys_enter(fd_.get(), unsubmitted_, 1);
        } while (taken < 0 && errno == EINTR);
        const int error = taken < 0 ? errno : 0;
        io_uring_cqe entry;
        if (error == 0 && take(entry)) {
            unsubmitted_ = 0;
            return;
        }
        unmap();
        refuse(error != 0 ? error : EIO, "io_uring_enter");
    }

    template <class T>
    static T* at(void* base, unsigned offset) {
        return reinterpret_cast<T*>(static_cast<uint8_t*>(base) + offset);
    }

    Fd fd_;
    std::vector<Area> areas_;
    void *sq_ = nullptr, *cq_ = nullptr, *sqe_ = nullptr;
    unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0, unsubmitted_ = 0;
    io_uring_cqe* cqes_ = nullptr;
};

class UringDrive : public Drive {
public:
    UringDrive(uint32_t depth, Files& files, Faults& faults, ReadDone done)
        : Drive(depth, files, faults, std::move(done)),
          ring_(entries_for(depth)),
          event_(make_event()),
          places_(depth) {
        for (uint32_t i = 0; i < depth; ++i) free_.push_back(i);
        thread_ = std::thread(&UringDrive::serve, this);
    }
    ~UringDrive() override { stop(); }

    void stop() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            wake();
        }
        if (thread_.joinable()) thread_.join();
    }

private:
    // What is in progress in one of the `depth` places.
    struct Place {
        Read* read = nullptr;
        std::optional<Progress> progress;
        iovec vector{};
        Bounce bounce;
    };

    static constexpr uint64_t kDoorbell = UINT64_MAX;

    static unsigned entries_for(uint32_t depth) {
        unsigned entries = 1;
        while (entries < depth + 1) entries *= 2;
        return entries;
    }

    void wake() override { ring_event(event_.get()); }

    void serve() {
        block_signals();
        listen();
        while (true) {
            while (begin_one()) {
            }
            if (free_.size() == places_.size()) {
                std::lock_guard<std::mutex> lock(mutex_);
                if (stopping_) return;
            }
            if (refused_ != 0) {
                wait_without_ring();
            } else if (const int error = ring_.submit_and_wait(); error != 0) {
                go_on_without_ring(error);
            }
            io_uring_cqe entry;
            while (ring_.take(entry)) {
                if (entry.user_data == kDoorbell) {
                    clear_event(event_.get());
                    listen();
                } else {
                    continue_at(static_cast<uint32_t>(entry.user_data), entry.res);
                }
            }
        }
    }

    // The kernel takes no more operations: from here on reads fail with its errno, and the other drives go on.
    // What it has taken may still be written into memory, so those reads keep their places until their results are
    // there.
    void go_on_without_ring(int error) {
        refused_ = error;
        for (const uint64_t data : ring_.take_back()) {
            if (data != kDoorbell) finish(static_cast<uint32_t>(data), error);
        }
    }

    void wait_without_ring() {
        pollfd ears[2] = {{event_.get(), POLLIN, 0}, {ring_.fd(), POLLIN, 0}};
        (void)::poll(ears, 2, 1000);  // results are also looked for when nothing says that there are any
        clear_event(event_.get());
    }

    void listen() {
        if (refused_ != 0) return;
        io_uring_sqe entry{};
        entry.opcode = IORING_OP_POLL_ADD;
        entry.fd = event_.get();
        entry.poll32_events = POLLIN;
        entry.user_data = kDoorbell;
        ring_.queue(entry);
    }

    bool begin_one() {
        Read* read;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            read = free_.empty() ? nullptr : next();
        }
        if (read == nullptr) return false;
        const uint32_t index = free_.back();
        free_.pop_back();
        Place& place = places_[index];
        place.read = read;
        int error = 0;
        try {
            uint8_t* bounce = read->chunk.into == nullptr ? place.bounce.get() : nullptr;
            place.progress.emplace(*read, files_.open(read->file), bounce, faults_);
            if (!place.progress->direct()) counters.direct.store(false, std::memory_order_relaxed);
        } catch (const std::system_error& refused) {
            error = refused.code().value();
        } catch (const std::bad_alloc&) {
            error = ENOMEM;
        }
        if (error != 0) {
            finish(index, error);
        } else {
            submit(index);
        }
        return true;
    }

    void submit(uint32_t index) {
        Place& place = places_[index];
        if (refused_ != 0) {
            finish(index, refused_);
            return;
        }
        if (!place.progress->prepare()) {
            finish(index, place.progress->error());
            return;
        }
        place.vector = {place.progress->target(), place.progress->length()};
        io_uring_sqe entry{};
        entry.opcode = IORING_OP_READV;
        entry.fd = place.progress->fd();
        entry.addr = reinterpret_cast<uint64_t>(&place.vector);
        entry.len = 1;
        entry.off = place.progress->position();
        entry.user_data = index;
        ring_.queue(entry);
    }

    void continue_at(uint32_t index, int result) {
        Place& place = places_[index];
        if (place.progress->advance(result)) {
            submit(index);
        } else {
            finish(index, place.progress->error());
        }
    }

    void finish(uint32_t index, int error) {
        Place& place = places_[index];
        Read& read = *place.read;
        place.progress.reset();
        place.read = nullptr;
        free_.push_back(index);
        ended(read, error);
    }

    Uring ring_;
    Fd event_;
    std::vector<Place> places_;
    std::vector<uint32_t> free_;
    int refused_ = 0;  // why the ring is used no more
    std::thread thread_;
};

}  // namespace

std::unique_ptr<Drive> make_uring_drive(uint32_t depth, Files& files, Faults& faults, ReadDone done) {
    return std::make_unique<UringDrive>(depth, files, faults, std::move(done));
}

}  // namespace k3::store
