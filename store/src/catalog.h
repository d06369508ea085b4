// Where every expert's bytes lie, and how they are read into a slot: a pure plan, no I/O.
//
// Filled while the server is set up (set_layer), read-only afterwards; then thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "layout.h"
#include "policy.h"

namespace k3::store {

// Reads are split into pieces of this size: large enough for any drive to reach its rate, small enough that one
// expert keeps several in flight and that a demand read waits little for a prefetch.
constexpr uint64_t kChunkBytes = uint64_t{4} << 20;

// An extent as catalogued: docs/container.md section 4.
struct Record {
    uint32_t file;
    uint32_t zero;
    uint64_t offset;
    uint64_t payload_bytes;
    uint64_t stored_bytes;
    uint8_t digest[16];
};
static_assert(sizeof(Record) == 48 && offsetof(Record, offset) == 8 && offsetof(Record, digest) == 32);

// One read of at most kChunkBytes (a bounced one: of the pages around it). `into` is where the pages [offset,
// offset + ask) go, the extent's bytes from `skip` on; nullptr: into a bounce buffer, from which `copy_bytes`
// starting at `skip` go to `copy_to`.
struct Chunk {
    uint32_t piece;
    uint64_t offset;  // a whole page
    uint64_t need;    // bytes that must arrive
    uint64_t ask;     // bytes asked for: whole pages
    uint8_t* into;
    uint64_t skip;
    uint8_t* copy_to;
    uint64_t copy_bytes;
    uint64_t extent_bytes() const { return into != nullptr ? need - skip : copy_bytes; }
};

// The stored bytes of one record and where in the slot they end up.
struct PiecePlan {
    Record record;
    uint8_t* stored;
    bool has_digest = true;
};

struct ExpertPlan {
    std::vector<PiecePlan> pieces;
    std::vector<Chunk> chunks;
    uint64_t payload_at = 0;  // in the slot
    uint64_t payload_bytes = 0;
    uint64_t slot_bytes = 0;  // of the slot that are written
};

// How to read the expert that `records` make up into the slot at `slot`, in reads of at most `chunk_bytes` (whole
// pages, at most kChunkBytes). Their sizes must make sense: see `refusal_of`.
ExpertPlan plan_expert(const Record* records, uint32_t count, uint64_t payload_bytes, uint8_t* slot,
                       uint64_t chunk_bytes = kChunkBytes);

// Why records do not make up an expert of this payload in a slot of this size; empty when they do. Records are
// taken for any numbers.
std::string refusal_of(const Record* records, uint32_t count, uint64_t payload_bytes, uint64_t slot_bytes);

class Catalog {
public:
    // `pieces` holds the number of records of each expert, in ascending id; `records` all of them in order.
    // std::invalid_argument when they do not fit together, the files or the slot.
    void set_layer(uint32_t layer, uint64_t payload_bytes, const std::vector<uint32_t>& pieces,
                   std::vector<Record> records, const std::vector<uint64_t>& file_bytes, uint64_t slot_bytes);

    bool contains(Key key) const;
    uint64_t payload_bytes(uint32_t layer) const { return layers_.at(layer).payload_bytes; }
    LayerCounts counts() const;

    // How to read an expert into the slot at `slot`.
    ExpertPlan plan(Key key, uint8_t* slot) const;

private:
    struct Layer {
        uint64_t payload_bytes;
        std::vector<uint32_t> first;  // of each expert's records; one more than experts
        std::vector<Record> records;
    };

    std::map<uint32_t, Layer> layers_;
};

}  // namespace k3::store
