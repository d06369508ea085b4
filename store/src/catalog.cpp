#include "catalog.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace k3::store {

namespace {

uint64_t page_floor(uint64_t n) { return n / kPage * kPage; }
uint64_t page_ceil(uint64_t n) { return page_floor(n + kPage - 1); }

// Whole pages around the record straight into the slot.
void read_straight(ExpertPlan& plan, uint32_t piece, const Record& record, uint8_t* pages, uint64_t chunk_bytes) {
    const uint64_t begin = page_floor(record.offset);
    const uint64_t need = record.offset + record.stored_bytes - begin;
    for (uint64_t at = 0; at < need; at += chunk_bytes) {
        const uint64_t part = std::min(chunk_bytes, need - at);
        const uint64_t skip = at == 0 ? record.offset - begin : 0;
        plan.chunks.push_back({piece, begin + at, part, page_ceil(part), pages + at, skip, nullptr, 0});
    }
}

// By way of a buffer: neighbours in the slot must not be touched.
void read_bounced(ExpertPlan& plan, uint32_t piece, const Record& record, uint8_t* to, uint64_t chunk_bytes) {
    const uint64_t end = record.offset + record.stored_bytes;
    for (uint64_t at = record.offset; at < end;) {
        const uint64_t begin = page_floor(at);
        const uint64_t stop = std::min(end, begin + chunk_bytes);
        const uint64_t need = stop - begin;
        plan.chunks.push_back({piece, begin, need, page_ceil(need), nullptr, at - begin, to, stop - at});
        to += stop - at;
        at = stop;
    }
}

}  // namespace

void Catalog::set_layer(uint32_t number, uint64_t payload_bytes, const std::vector<uint32_t>& pieces,
                        std::vector<Record> records, const std::vector<uint64_t>& file_bytes,
                        uint64_t slot_bytes) {
    Layer layer{payload_bytes, {0}, std::move(records)};
    for (const uint32_t count : pieces) {
        const uint64_t end = uint64_t{layer.first.back()} + count;
        if (end > layer.records.size()) break;
        layer.first.push_back(static_cast<uint32_t>(end));
    }
    const std::string where = "layer " + std::to_string(number);
    if (layer.first.size() != pieces.size() + 1 || layer.first.back() != layer.records.size()) {
        throw std::invalid_argument(where + ": the numbers of pieces do not add up to the records");
    }
    for (uint32_t expert = 0; expert < pieces.size(); ++expert) {
        const std::string who = where + ", expert " + std::to_string(expert);
        for (uint32_t i = layer.first[expert]; i < layer.first[expert + 1]; ++i) {
            const Record& record = layer.records[i];
            if (record.file >= file_bytes.size()) throw std::invalid_argument(who + ": no such file");
            // Before anything is added up or planned with these: they may be any number.
            const uint64_t bytes = file_bytes[record.file];
            if (record.offset > bytes || record.stored_bytes > bytes - record.offset) {
                throw std::invalid_argument(who + ": " + std::to_string(record.stored_bytes) + " bytes at " +
                                            std::to_string(record.offset) + " do not lie in a file of " +
                                            std::to_string(bytes) + " bytes");
            }
        }
        const uint32_t first = layer.first[expert];
        const std::string refusal =
            refusal_of(layer.records.data() + first, layer.first[expert + 1] - first, payload_bytes, slot_bytes);
        if (!refusal.empty()) throw std::invalid_argument(who + refusal);
    }
    layers_[number] = std::move(layer);
}

bool Catalog::contains(Key key) const {
    const auto found = layers_.find(key.layer);
    return found != layers_.end() && key.expert < found->second.first.size() - 1;
}

LayerCounts Catalog::counts() const {
    LayerCounts counts;
    for (const auto& [number, layer] : layers_) counts[number] = static_cast<uint32_t>(layer.first.size() - 1);
    return counts;
}

ExpertPlan Catalog::plan(Key key, uint8_t* slot) const {
    const Layer& layer = layers_.at(key.layer);
    const uint32_t first = layer.first[key.expert];
    return plan_expert(layer.records.data() + first, layer.first[key.expert + 1] - first, layer.payload_bytes,
                       slot);
}

std::string refusal_of(const Record* records, uint32_t count, uint64_t payload_bytes, uint64_t slot_bytes) {
    uint64_t sum = 0;
    // Each size is looked at before anything is added up or planned with it.
    for (uint32_t i = 0; i < count && sum <= payload_bytes; ++i) {
        const Record& record = records[i];
        if (record.stored_bytes > slot_bytes) {
            return " needs a slot of at least " + std::to_string(record.stored_bytes) + " bytes, they have " +
                   std::to_string(slot_bytes);
        }
        if (record.stored_bytes == 0 || record.payload_bytes > record.stored_bytes ||
            (i + 1 < count && record.payload_bytes != record.stored_bytes) ||
            record.offset > uint64_t{INT64_MAX} - record.stored_bytes - kPage) {
            return ": a record's sizes make no sense";
        }
        sum += record.payload_bytes;
    }
    if (sum != payload_bytes || payload_bytes == 0) {
        return ": its pieces do not make up " + std::to_string(payload_bytes) + " bytes";
    }
    const uint64_t needed = plan_expert(records, count, payload_bytes, nullptr).slot_bytes;
    if (needed <= slot_bytes) return "";
    return " needs a slot of " + std::to_string(needed) + " bytes, they have " + std::to_string(slot_bytes);
}

ExpertPlan plan_expert(const Record* records, uint32_t count, uint64_t payload_bytes, uint8_t* slot,
                       uint64_t chunk_bytes) {
    const bool alone = count == 1;
    ExpertPlan plan;
    plan.payload_bytes = payload_bytes;
    // A single record may lie anywhere: its payload then begins as far into the slot as it does into its page.
    plan.payload_at = alone ? records[0].offset % kPage : 0;
    uint64_t at = plan.payload_at;
    for (uint32_t piece = 0; piece < count; ++piece) {
        const Record& record = records[piece];
        const bool whole = record.offset % kPage == 0 && at % kPage == 0 && record.stored_bytes % kPage == 0;
        plan.pieces.push_back({record, slot + at});
        if (alone || whole) {
            read_straight(plan, piece, record, slot + page_floor(at), chunk_bytes);
            plan.slot_bytes = page_ceil(at + record.stored_bytes);
        } else {
            read_bounced(plan, piece, record, slot + at, chunk_bytes);
            plan.slot_bytes = at + record.stored_bytes;
        }
        at += record.payload_bytes;
    }
    return plan;
}

}  // namespace k3::store
