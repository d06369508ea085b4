#include "reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace k3::store {

Reader::Reader(const ReaderOptions& options, uint32_t drives, Files& files, Faults& faults, PieceDone done)
    : files_(files), done_(std::move(done)) {
    const auto sink = [this](Read& read, int error) { read_done(read, error); };
    for (uint32_t i = 0; i < drives; ++i) {
        drives_.push_back(std::make_unique<Drive>(options.depth, options.background, files, faults, sink));
    }
    try {
        const uint32_t half = std::max(1u, std::thread::hardware_concurrency() / 2);
        const uint32_t checkers = options.checkers != 0 ? options.checkers : std::min(drives, half);
        for (uint32_t i = 0; i < checkers; ++i) checkers_.emplace_back(&Reader::serve_checks, this);
    } catch (...) {
        stop();
        throw;
    }
}

void Reader::prepare(Job& job, const ExpertPlan& plan, const Files& files) const {
    for (const PiecePlan& piece : plan.pieces) {
        job.pieces.emplace_back(piece, files.root(piece.record.file));
        job.pieces.back().version = files.version(piece.record.file);
    }
    for (const Chunk& chunk : plan.chunks) {
        PieceRead& piece = job.pieces[chunk.piece];
        piece.reads.push_back({&job, chunk, piece.plan.record.file});
    }
    job.reads = plan.chunks.size();
}

void Reader::start(Job& job) {
    // Gathered first: once the first read is queued the job may end at any moment.
    std::vector<std::vector<Read*>> by_drive(drives_.size());
    for (PieceRead& piece : job.pieces) {
        set_check(piece, job.check && piece.plan.has_digest);
        begin_attempt(piece);
        for (Read& read : piece.reads) by_drive[piece.root].push_back(&read);
    }
    for (size_t i = 0; i < drives_.size(); ++i) {
        // Never called off: its owner is here.
        if (!by_drive[i].empty()) drives_[i]->push(by_drive[i], job, false);
    }
}

void Reader::promote(Job& job) {
    job.demand.store(true, std::memory_order_relaxed);
    for (PieceRead& piece : job.pieces) drives_[piece.root]->promote(piece.reads);
}

bool Reader::call_off(Job& job) {
    if (job.called_off.exchange(true, std::memory_order_relaxed)) return false;  // and something was in progress
    std::vector<Read*> taken;
    for (PieceRead& piece : job.pieces) drives_[piece.root]->take_back(piece.reads, taken);
    call_off_steps_.fetch_add(job.reads, std::memory_order_relaxed);
    // With all of them back nobody else knows of the job any more: a piece that waits for its second try has its
    // reads in the queue, and whoever put them there has not touched the job since.
    if (taken.size() == job.reads) return true;
    for (Read* read : taken) read_done(*read, kCalledOff);
    return false;
}

bool Reader::call_off_if_not_begun(Job& job) {
    std::vector<std::unique_lock<std::mutex>> locks;
    for (const auto& drive : drives_) locks.emplace_back(drive->mutex());
    call_off_steps_.fetch_add(job.reads, std::memory_order_relaxed);
    const auto is_queued = [&](PieceRead& piece) {
        if (piece.attempt != 1) return false;  // it waits for its second try: let it have that
        return std::all_of(piece.reads.begin(), piece.reads.end(),
                           [&](Read& r) { return drives_[piece.root]->is_queued(r); });
    };
    if (!std::all_of(job.pieces.begin(), job.pieces.end(), is_queued)) return false;
    for (PieceRead& piece : job.pieces) {
        for (Read& read : piece.reads) read.queue->remove(read);
    }
    return true;
}

// Nobody else knows of the piece yet: its reads are queued after this.
void Reader::set_check(PieceRead& piece, bool check) const {
    piece.check = check;
    for (Read& read : piece.reads) read.version = check || !piece.plan.has_digest ? 0 : piece.version;
}

void Reader::begin_attempt(PieceRead& piece) const {
    piece.reads_left = piece.reads.size();
    piece.error = 0;
    if (!piece.check) return;
    piece.arrived.assign(piece.reads.size(), false);
    piece.in_order = piece.hashed = 0;
    piece.digest = Xxh3Stream(piece.plan.stored, piece.plan.record.stored_bytes);
}

void Reader::read_done(Read& read, int error) {
    Job& job = *read.job;
    PieceRead& piece = piece_of(read);
    if (error > 0) drives_[piece.root]->counters.errors.fetch_add(1, std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (error != 0 && piece.error == 0) {
            piece.error = error;
            piece.is_open = read.is_open || error == kCalledOff;
            piece.error_offset = read.chunk.offset;
        }
        --piece.reads_left;
        if (piece.check && error == 0) arrive(piece, read);
        if (piece.check && !piece.checking && has_more_to_hash(piece)) {
            piece.checking = true;
            unchecked_.emplace_back(&job, &piece);
            more_.notify_one();
        }
        if (piece.reads_left > 0 || piece.checking) return;  // what comes last ends the attempt
    }
    piece.outcome = outcome_of(piece);
    attempt_over(job, piece);
}

void Reader::arrive(PieceRead& piece, const Read& read) {
    piece.arrived[static_cast<size_t>(&read - piece.reads.data())] = true;
    while (piece.in_order < piece.reads.size() && piece.arrived[piece.in_order]) ++piece.in_order;
}

void Reader::serve_checks() {
    block_signals();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        more_.wait(lock, [this] { return stopping_ || !unchecked_.empty(); });
        if (stopping_) return;
        const auto [job, piece] = unchecked_.front();
        unchecked_.pop_front();
        while (has_more_to_hash(*piece)) {
            const size_t upto = piece->in_order;
            lock.unlock();
            hash(*piece, piece->bytes_up_to(upto - 1));
            lock.lock();
            piece->hashed = upto;
        }
        piece->checking = false;
        if (piece->reads_left > 0) continue;
        lock.unlock();
        piece->outcome = outcome_of(*piece);
        if (piece->outcome == Status::ok) compare(*piece);
        attempt_over(*job, *piece);
        lock.lock();
    }
}

// Of an attempt whose digest is not compared, or not yet.
Status Reader::outcome_of(const PieceRead& piece) {
    return piece.error == 0 ? Status::ok : piece.error == kCalledOff ? Status::cancelled : Status::io_error;
}

void Reader::hash(PieceRead& piece, uint64_t arrived_bytes) {
    const uint64_t began_ns = now_ns();
    piece.digest.advance(arrived_bytes);
    check_ns_.fetch_add(now_ns() - began_ns, std::memory_order_relaxed);
}

void Reader::compare(PieceRead& piece) {
    piece.digest.finish(piece.found);
    checked_bytes_.fetch_add(piece.plan.record.stored_bytes, std::memory_order_relaxed);
    const bool right = std::memcmp(piece.found, piece.plan.record.digest, sizeof piece.found) == 0;
    piece.outcome = right ? Status::ok : Status::damaged;
    if (right) return;
    piece.error_offset = piece.plan.record.offset;
    drives_[piece.root]->counters.errors.fetch_add(1, std::memory_order_relaxed);
    drives_[piece.root]->counters.damaged.fetch_add(1, std::memory_order_relaxed);
}

void Reader::attempt_over(Job& job, PieceRead& piece) {
    if (piece.outcome == Status::ok || piece.attempt == kAttempts ||
        job.called_off.load(std::memory_order_relaxed)) {
        done_(job, piece);
        return;
    }
    Drive& drive = *drives_[piece.root];
    if (piece.error == kFileChanged) {
        set_check(piece, true);  // and so this happens once: no failure of the drive's, nor its second try
    } else {
        ++piece.attempt;
        drive.counters.re_reads.fetch_add(1, std::memory_order_relaxed);
    }
    begin_attempt(piece);
    files_.drop(piece.plan.record.file);  // it may have been replaced by a sound one meanwhile
    std::vector<Read*> again;
    for (Read& read : piece.reads) again.push_back(&read);
    if (!drive.push(again, job, true)) done_(job, piece);  // called off in this very moment
}

void Reader::stop() {
    for (const auto& drive : drives_) drive->stop();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    more_.notify_all();
    for (std::thread& thread : checkers_) thread.join();
    checkers_.clear();
}

}  // namespace k3::store
