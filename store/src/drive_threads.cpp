// A drive as `depth` threads, each doing one pread after the other.
#include <unistd.h>

#include <cerrno>

#include "drive.h"

namespace k3::store {

namespace {

class ThreadDrive : public Drive {
public:
    ThreadDrive(uint32_t depth, Files& files, Faults& faults, ReadDone done)
        : Drive(depth, files, faults, std::move(done)) {
        try {
            for (uint32_t i = 0; i < depth; ++i) threads_.emplace_back(&ThreadDrive::serve, this);
        } catch (...) {
            stop();
            throw;
        }
    }
    ~ThreadDrive() override { stop(); }

    void stop() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        more_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

private:
    void wake() override { more_.notify_all(); }

    void serve() {
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

    int run(Read& read, Bounce& bounce) {
        try {
            Progress progress(read, files_.open(read.file), read.chunk.into == nullptr ? bounce.get() : nullptr,
                              faults_);
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

    std::condition_variable more_;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Drive> make_thread_drive(uint32_t depth, Files& files, Faults& faults, ReadDone done) {
    return std::make_unique<ThreadDrive>(depth, files, faults, std::move(done));
}

}  // namespace k3::store
