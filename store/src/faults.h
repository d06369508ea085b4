// Faults on purpose, for tests: what a bad drive does, at chosen places and in a seeded order. Off unless a rule
// is set, and then one relaxed load per read. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace k3::store {

enum class FaultKind : uint8_t { error, shorten, flip, stall };

// Hits reads of `file` (any: -1) that touch [begin, end), each with `probability`, `times` times (-1: for ever).
struct FaultRule {
    FaultKind kind;
    int64_t file = -1;
    uint64_t begin = 0;
    uint64_t end = UINT64_MAX;
    int64_t times = -1;
    double probability = 1.0;
    uint64_t argument = 0;  // error: errno; shorten: bytes that are returned; stall: milliseconds at most
};

// What is to go wrong with one read.
struct Fault {
    int error = 0;
    uint64_t shorten_to = UINT64_MAX;
    bool flip = false;
    uint64_t flip_at = 0;  // to be taken modulo the bytes read
    uint64_t stall_ms = 0;
    uint64_t stall_since = 0;  // `resumes_` at that moment
};

class Faults {
public:
    bool active() const { return active_.load(std::memory_order_relaxed); }

    void add(const FaultRule& rule, uint64_t seed) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (rules_.empty()) random_.seed(seed);
        rules_.push_back(rule);
        active_.store(true, std::memory_order_relaxed);
    }

    void clear() {
        std::lock_guard<std::mutex> lock(mutex_);
        rules_.clear();
        active_.store(false, std::memory_order_relaxed);
        end_stalls();
    }

    // Ends the stalls that have begun; the rules stay. So a test decides by events when a drive answers.
    void resume() {
        std::lock_guard<std::mutex> lock(mutex_);
        end_stalls();
    }

    // Keeps the caller until `resume` or `clear`, or as long as the rule says.
    void stall(const Fault& fault) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto ended = [&] { return resumes_ != fault.stall_since; };
        resumed_.wait_for(lock, std::chrono::milliseconds(fault.stall_ms), ended);
    }

    uint64_t fired() const { return fired_.load(std::memory_order_relaxed); }
    // File and offset of the reads that a rule hit, in their order.
    std::vector<std::pair<uint32_t, uint64_t>> struck() {
        std::lock_guard<std::mutex> lock(mutex_);
        return struck_;
    }

    Fault next(uint32_t file, uint64_t offset, uint64_t bytes) {
        Fault fault;
        if (!active()) return fault;
        std::lock_guard<std::mutex> lock(mutex_);
        for (FaultRule& rule : rules_) {
            if (rule.times == 0 || (rule.file >= 0 && rule.file != static_cast<int64_t>(file))) continue;
            if (offset >= rule.end || offset + bytes <= rule.begin) continue;
            if (rule.probability < 1.0 && std::uniform_real_distribution<>()(random_) >= rule.probability)
                continue;
            if (rule.times > 0) --rule.times;
            fired_.fetch_add(1, std::memory_order_relaxed);
            if (struck_.size() < kStruckMax) struck_.emplace_back(file, offset);
            switch (rule.kind) {
                case FaultKind::error: fault.error = static_cast<int>(rule.argument); break;
                case FaultKind::shorten: fault.shorten_to = rule.argument; break;
                case FaultKind::flip: fault.flip = true, fault.flip_at = random_(); break;
                case FaultKind::stall: fault.stall_ms = rule.argument, fault.stall_since = resumes_; break;
            }
        }
        return fault;
    }

private:
    static constexpr size_t kStruckMax = 10'000;

    void end_stalls() {
        ++resumes_;
        resumed_.notify_all();
    }

    std::atomic<bool> active_{false};
    std::atomic<uint64_t> fired_{0};
    std::mutex mutex_;
    std::condition_variable resumed_;
    uint64_t resumes_ = 0;
    std::vector<FaultRule> rules_;
    std::vector<std::pair<uint32_t, uint64_t>> struck_;
    std::mt19937_64 random_;
};

}  // namespace k3::store
