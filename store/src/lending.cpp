#include "lending.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace k3::store {

namespace {

LendingOptions checked(LendingOptions o) {
    const auto need = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(what);
    };
    need(o.slot_bytes > 0 && o.slot_bytes % kPage == 0, "slot_bytes must be whole pages");
    need(o.slots >= 1 && o.slots <= kSlotsMax, "slots must be from 1 to 2^20");
    need(o.working_slots >= 1 && uint64_t{o.working_slots} + o.prefetch_slots <= o.slots,
         "there must be room for what is held and for prefetches");
    need(o.chunk_bytes > 0 && o.chunk_bytes % kPage == 0 && o.chunk_bytes <= kChunkBytes,
         "reads must be whole pages, at most 4 MiB");
    need(o.reader.depth >= 1 && o.reader.depth <= 1024, "threads must be from 1 to 1024");
    need(o.open_files >= 1, "the limit of open files must be at least 1");
    return o;
}

}  // namespace

Lending::Lending(const LendingOptions& options, uint8_t* memory)
    : options_(checked(options)),
      memory_(memory),
      files_(options.open_files),
      slots_(options.slots, make_policy(options.policy, options.slots, options.counts, {})),
      tickets_(all_tickets()) {}

Lending::~Lending() {
    faults_.clear();  // reads that a fault keeps waiting end now
    close();
}

uint32_t Lending::add_file(const std::string& path) { return files_.declare(0, path, options_.direct); }

void Lending::place(Key key, uint64_t payload_bytes, std::vector<Record> records, std::vector<bool> has_digest) {
    const auto count = static_cast<uint32_t>(records.size());
    const std::string refusal = refusal_of(records.data(), count, payload_bytes, options_.slot_bytes);
    if (!refusal.empty()) throw std::invalid_argument("the expert" + refusal);
    if (has_digest.size() != count) throw std::invalid_argument("as many digests as records");
    std::lock_guard<std::mutex> lock(mutex_);
    placed_.emplace(key, Placed{payload_bytes, std::move(records), std::move(has_digest)});
}

void Lending::begin_reading() {
    if (reader_) return;
    const auto note = [this](Job& job, PieceRead& piece) { piece_done(job, piece); };
    reader_ = std::make_unique<Reader>(options_.reader, 1, files_, faults_, note);
    process_ = ::getpid();
}

bool Lending::is_inherited() const {
    const pid_t process = process_;
    return process != 0 && process != ::getpid();
}

// Requests

Lending::RequestPtr Lending::request(uint32_t layer, const std::vector<uint32_t>& experts) {
    auto made = std::make_shared<Request>();
    std::lock_guard<std::mutex> lock(mutex_);
    for (const uint32_t expert : experts) {
        const Key key{layer, expert};
        if (placed_.count(key) == 0) throw std::invalid_argument("nobody said where this expert lies");
        made->unstarted.push_back(key);
    }
    if (!closed_ && !experts.empty()) begin_reading();
    return made;
}

Lending::Outcome Lending::admit(const RequestPtr& request, uint64_t slice_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!request->in_line) {
        line_.push_back(request.get());
        request->in_line = true;
        request->waits_since_ns = now_ns();
    }
    const uint64_t wanted = std::min<uint64_t>(request->unstarted.size(), options_.working_slots);
    const auto may = [&] { return closed_ || (line_.front() == request.get() && tickets_ >= wanted); };
    if (slice_ns != 0) changed_.wait_for(lock, std::chrono::nanoseconds(slice_ns), may);
    if (!may()) {
        if (!is_out_of_patience(*request)) return Outcome::waiting;
        leave_line(*request);
        return Outcome::no_room;
    }
    leave_line(*request);
    if (closed_) return Outcome::closed;
    tickets_ -= wanted;
    request->tickets = wanted;
    // What is in is held before anything is begun that could push it out.
    std::stable_partition(request->unstarted.begin(), request->unstarted.end(),
                          [this](Key key) { return slots_.find(key) != kNoSlot; });
    advance(request);
    return Outcome::ready;
}

void Lending::leave_line(Request& request) {
    line_.erase(std::find(line_.begin(), line_.end(), &request));
    request.in_line = false;
    stop_waiting(request);
    changed_.notify_all();  // it may be the next one's turn
}

void Lending::stop_waiting(Request& request) {
    if (request.waits_since_ns != 0) counted_.wait_ns += now_ns() - request.waits_since_ns;
    request.waits_since_ns = 0;
}

bool Lending::is_out_of_patience(const Request& request) const {
    return now_ns() - request.waits_since_ns >= options_.patience_ns;
}

// Starts as much of a request as it has tickets for.
void Lending::advance(const RequestPtr& request) {
    while (!request->unstarted.empty() && request->tickets > 0 && !closed_) {
        const Key key = request->unstarted.front();
        slots_.access(key);
        const uint32_t slot = slots_.find(key);
        if (slot != kNoSlot && slots_[slot].state == SlotState::ready) {
            if (slots_[slot].unused) {
                slots_.set_used(slot);
                ++counted_.prefetch_hits;
            }
            slots_.hold(slot);
            request->ready.push_back(slot);
            ++counted_.hits;
        } else if (slot != kNoSlot) {
            Flight& flight = *flights_.at(key);
            if (flight.hint != 0) {
                flight.hint = 0;
                --guesses_;
                ++counted_.prefetch_hits;
                reader_->promote(flight);
            }
            flight.waiters.push_back(request);
            ++request->in_flight;
            ++counted_.joined;
        } else {
            take_off(key, 0)->waiters.push_back(request);
            ++request->in_flight;
            ++counted_.misses;
        }
        request->unstarted.pop_front();
        --request->tickets;
    }
    changed_.notify_all();
}

Lending::Outcome Lending::next(const RequestPtr& request, uint64_t slice_ns, Loan& loan,
                               std::shared_ptr<const LoanFailure>& failure) {
    std::unique_lock<std::mutex> lock(mutex_);
    Request& asked = *request;
    const uint64_t until_ns = now_ns() + slice_ns;
    while (!closed_ && !asked.closed && asked.ready.empty() && asked.failures.empty() &&
           (asked.in_flight > 0 || !asked.unstarted.empty())) {
        if (asked.in_flight == 0 &&
            tickets_ > 0) {  // the caller holds all that it was admitted with: lend one more
            --tickets_;
            ++asked.tickets;
            advance(request);
            continue;
        }
        const uint64_t now = now_ns();
        if (asked.waits_since_ns == 0) asked.waits_since_ns = now;
        if (asked.in_flight == 0 && is_out_of_patience(asked)) {
            stop_waiting(asked);
            return Outcome::no_room;
        }
        if (now >= until_ns) return Outcome::waiting;
        changed_.wait_for(lock, std::chrono::nanoseconds(until_ns - now));
    }
    stop_waiting(asked);
    if (closed_) return Outcome::closed;
    if (!asked.ready.empty()) {
        const uint32_t slot = asked.ready.front();
        asked.ready.pop_front();
        const Slot& lent = slots_[slot];
        loan = {lent.key.layer, lent.key.expert, slot, slot * options_.slot_bytes + lent.payload_at,
                placed_.at(lent.key).payload_bytes};
        return Outcome::ready;
    }
    if (asked.failures.empty()) return Outcome::over;
    failure = asked.failures.front();
    asked.failures.pop_front();
    return Outcome::ready;
}

void Lending::release(const RequestPtr& request, uint32_t slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    slots_.let_go(slot);
    if (!request->unstarted.empty() && !request->closed) {
        ++request->tickets;
        advance(request);
    } else {
        ++tickets_;
    }
    begin_guesses();
    changed_.notify_all();
}

void Lending::give_up(const RequestPtr& request) {
    std::vector<FlightPtr> unwanted;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (request->closed) return;
        if (request->in_line) leave_line(*request);
        request->closed = true;
        if (request->in_flight > 0) {
            for (const auto& [key, flight] : flights_) {
                const auto& waiters = flight->waiters;
                const auto is_over = [](const RequestPtr& waiter) { return waiter->closed; };
                if (!waiters.empty() && std::all_of(waiters.begin(), waiters.end(), is_over)) {
                    unwanted.push_back(flight);
                }
            }
        }
        give_back(*request);
        changed_.notify_all();
    }
    call_off(unwanted);
}

// Takes everything from a closed request that was not handed out. Its flights follow when they end.
void Lending::give_back(Request& request) {
    request.unstarted.clear();
    request.failures.clear();
    for (const uint32_t slot : request.ready) slots_.let_go(slot);
    tickets_ += request.ready.size() + request.tickets;
    request.ready.clear();
    request.tickets = 0;
}

uint64_t Lending::held_tickets() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return all_tickets() - tickets_;
}

// Flights

// Begins to read an expert into a slot that nobody holds. nullptr, only for a guess, when there is none.
Lending::FlightPtr Lending::take_off(Key key, uint64_t hint) {
    const uint32_t slot = slots_.begin(key);
    if (slot == kNoSlot) {
        if (hint == 0) throw std::logic_error("a read that has a ticket finds no slot");
        return nullptr;
    }
    const Placed& placed = placed_.at(key);
    ExpertPlan plan =
        plan_expert(placed.records.data(), static_cast<uint32_t>(placed.records.size()), placed.payload_bytes,
                    memory_ + slot * options_.slot_bytes, options_.chunk_bytes);
    for (size_t i = 0; i < plan.pieces.size(); ++i) plan.pieces[i].has_digest = placed.has_digest[i];
    auto flight = std::make_shared<Flight>();
    flight->key = key;
    flight->slot = slot;
    flight->hint = hint;
    flight->payload_at = plan.payload_at;
    flight->demand.store(hint == 0, std::memory_order_relaxed);
    reader_->prepare(*flight, plan, files_);
    for (const PieceRead& piece : flight->pieces) flight->versions += piece.version;
    flight->check = must_check(*flight);
    flight->pieces_left = flight->pieces.size();
    flights_[key] = flight;
    reader_->start(*flight);
    return flight;
}

// Whether digests are compared. Always of a file that is not the one, or not as, it was at its first read or when
// its bytes were last compared: nobody has said anything about those bytes. (That it changed may be seen only when
// it is read; then the reader compares.)
bool Lending::must_check(const Flight& flight) const {
    if (options_.verify == Verify::always) return true;
    if (options_.verify == Verify::never) return flight.versions != flight.pieces.size();
    const auto found = verified_.find(flight.key);
    return found == verified_.end() || found->second != flight.versions;
}

// Called by the reader's threads, and by whoever calls a job off.
void Lending::piece_done(Job& job, PieceRead& piece) {
    std::lock_guard<std::mutex> lock(mutex_);
    Flight& flight = static_cast<Flight&>(job);
    const uint64_t stored_bytes = piece.plan.record.stored_bytes;
    if (piece.outcome != Status::cancelled) {
        counted_.reads += static_cast<uint64_t>(piece.attempt);
        counted_.retries += static_cast<uint64_t>(piece.attempt - 1);
    }
    if (piece.outcome == Status::ok) {
        (piece.check ? counted_.checked_bytes : counted_.unchecked_bytes) += stored_bytes;
    } else if (flight.failure == nullptr) {
        flight.failure = &piece;
    }
    if (--flight.pieces_left == 0) end(flight);
}

// A flight of which nothing is in progress, and nothing will be.
void Lending::end(Flight& flight) {
    const FlightPtr mine = flights_.at(flight.key);
    flights_.erase(flight.key);
    if (flight.hint != 0) --guesses_;
    if (flight.failure == nullptr && flight.pieces_left == 0) {
        land(flight);
    } else if (flight.called_off.load(std::memory_order_relaxed)) {
        slots_.failed(flight.slot);
        std::vector<RequestPtr> waiters;
        for (RequestPtr& waiter : flight.waiters) {
            if (!waiter->closed && !closed_) {
                waiters.push_back(std::move(waiter));
                continue;
            }
            --waiter->in_flight;
            ++tickets_;
        }
        // Who has asked for it since then gets it from a new read.
        if (!waiters.empty()) take_off(flight.key, 0)->waiters = std::move(waiters);
    } else {
        fail(flight);
    }
    begin_guesses();
    changed_.notify_all();
}

void Lending::land(Flight& flight) {
    if (flight.check && options_.verify == Verify::first) verified_[flight.key] = flight.versions;
    slots_.filled(flight.slot, flight.payload_at);
    if (flight.hint != 0) slots_.set_unused(flight.slot, 0, flight.hint);
    for (const RequestPtr& waiter : flight.waiters) {
        --waiter->in_flight;
        slots_.hold(flight.slot);
        waiter->ready.push_back(flight.slot);
        if (waiter->closed) give_back(*waiter);
    }
    slots_.let_go(flight.slot);
}

void Lending::fail(Flight& flight) {
    slots_.failed(flight.slot);
    const PieceRead& piece = *flight.failure;
    const auto failure = std::make_shared<LoanFailure>();
    failure->key = flight.key;
    failure->status = piece.outcome;
    failure->error = piece.error;
    failure->is_open = piece.is_open;
    failure->offset = piece.error_offset;
    failure->record = piece.plan.record;
    std::memcpy(failure->found, piece.found, sizeof failure->found);
    for (const RequestPtr& waiter : flight.waiters) {
        --waiter->in_flight;
        ++waiter->tickets;
        waiter->failures.push_back(failure);
        if (waiter->closed) give_back(*waiter);
    }
}

// Not under the lock: what is called off may be done at once.
void Lending::call_off(const std::vector<FlightPtr>& flights) {
    for (const FlightPtr& flight : flights) {
        if (!reader_->call_off(*flight)) continue;
        std::lock_guard<std::mutex> lock(mutex_);
        if (flight->hint != 0) --counted_.prefetched;  // it was not even begun
        end(*flight);
    }
}

// Guesses

uint64_t Lending::prefetch(uint32_t layer, const std::vector<uint32_t>& experts) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return 0;
    const uint64_t hint = ++last_hint_;
    if (options_.prefetch_slots == 0 || experts.empty()) return hint;
    begin_reading();
    const size_t count = std::min<size_t>(experts.size(), options_.prefetch_slots);
    for (size_t i = 0; i < count; ++i) {
        const Key key{layer, experts[i]};
        if (placed_.count(key) == 0) continue;
        const uint32_t slot = slots_.find(key);
        if (slot == kNoSlot) {
            hints_.emplace_back(hint, key);
        } else if (slots_[slot].state == SlotState::filling) {
            Flight& flight = *flights_.at(key);
            if (flight.hint != 0) flight.hint = hint;  // an earlier hint's, which may be taken back
        } else if (slots_[slot].unused) {
            slots_.set_used(slot);  // and is the newest again
            slots_.set_unused(slot, 0, hint);
        }
    }
    while (hints_.size() > options_.prefetch_slots) hints_.pop_front();
    begin_guesses();
    return hint;
}

void Lending::take_back(uint64_t hint) {
    std::vector<FlightPtr> unwanted;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (closed_ || hint == 0) return;
        const auto is_mine = [hint](const std::pair<uint64_t, Key>& wanted) { return wanted.first == hint; };
        hints_.erase(std::remove_if(hints_.begin(), hints_.end(), is_mine), hints_.end());
        for (const auto& [key, flight] : flights_) {
            if (flight->hint == hint) unwanted.push_back(flight);
        }
    }
    call_off(unwanted);
}

// Begins the hints that there is room for, the oldest first.
void Lending::begin_guesses() {
    while (!hints_.empty() && !closed_) {
        const auto [hint, key] = hints_.front();
        if (slots_.find(key) != kNoSlot) {
            hints_.pop_front();
            continue;
        }
        if (guesses_ == options_.prefetch_slots) return;
        if (guesses_ + slots_.unused() == options_.prefetch_slots) slots_.drop(slots_.unused_by().at(0).front());
        if (take_off(key, hint) == nullptr) return;
        hints_.pop_front();
        ++guesses_;
        ++counted_.prefetched;
    }
}

// The rest

LendingStats Lending::stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    LendingStats s = counted_;
    s.evictions = slots_.evictions();
    s.open_files = files_.open_count();
    s.faults = faults_.fired();
    s.opened = files_.opened();
    if (reader_) {
        const DriveCounters& drive = reader_->drives().front()->counters;
        s.read_bytes = drive.extent_bytes, s.read_ns = drive.read_ns + reader_->check_ns();
    }
    return s;
}

void Lending::close() {
    Reader* reader;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        hints_.clear();
        reader = reader_.get();
        changed_.notify_all();
    }
    std::lock_guard<std::mutex> one_at_a_time(closing_);
    if (reader != nullptr) reader->stop();
    files_.close();
}

}  // namespace k3::store
