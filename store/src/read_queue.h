// Reads in order, linked through themselves: one leaves from anywhere in a step, however many there are. So
// calling a job's reads off, or moving them ahead, takes as many steps as the job has reads and not as many as the
// queue has.
//
// Owns nothing. Not thread-safe (its drive's lock).
#pragma once

#include <cstddef>
#include <cstdint>

#include "catalog.h"

namespace k3::store {

struct Job;
class ReadQueue;

// One chunk on its way. Lives in its job, which outlives every read; never moved once it was queued.
struct Read {
    Job* job;
    Chunk chunk;
    uint32_t file;
    uint64_t version = 0;  // of its file, where nobody compares its bytes with a digest; 0: any
    // Of the drive, under its lock:
    uint64_t began_ns = 0;  // while in progress
    bool in_background = false;
    bool is_open = false;  // of the thread that reads: its file could be opened
    ReadQueue* queue = nullptr;
    Read *before = nullptr, *after = nullptr;
};

class ReadQueue {
public:
    bool empty() const { return size_ == 0; }
    size_t size() const { return size_; }
    Read* front() const { return first_; }

    void push_back(Read& read) { insert(read, last_, nullptr); }
    void push_front(Read& read) { insert(read, nullptr, first_); }

    // Only of a read that is in this queue.
    void remove(Read& read) {
        (read.before != nullptr ? read.before->after : first_) = read.after;
        (read.after != nullptr ? read.after->before : last_) = read.before;
        read.before = read.after = nullptr;
        read.queue = nullptr;
        --size_;
    }

private:
    void insert(Read& read, Read* before, Read* after) {
        read.before = before, read.after = after;
        (before != nullptr ? before->after : first_) = &read;
        (after != nullptr ? after->before : last_) = &read;
        read.queue = this;
        ++size_;
    }

    Read *first_ = nullptr, *last_ = nullptr;
    size_t size_ = 0;
};

}  // namespace k3::store
