// Fuzz target: any record with any slices, through everything that reads a delta, at every instruction level.
//
// Input: a byte of flags; the columns of the record, as one byte each (three for the code) or as eight, its four rows
// columns last; then the bytes of the slices, one behind the other, as long as the record wants them (zeros when the
// input ends early).
// Besides what the sanitizers see, levels must agree, and a valid delta must list ascending positions in range.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "dispatch.hpp"
#include "record.hpp"

namespace dr = deltarefit;
using dr::u32;
using dr::u64;
using dr::u8;

namespace {

constexpr u64 kMostBytes = 1 << 20;   // of all slices
constexpr u64 kMostDense = 1 << 16;   // elements of an array that really exists
constexpr u64 kKey = 0x0123456789ABCDEFull;

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

class Input {
 public:
  Input(const u8* data, std::size_t size) : at_(data), end_(data + size) {}

  u64 number(u32 bytes) {
    u64 value = 0;
    for (u32 i = 0; i < bytes; ++i) value |= u64(byte()) << (8 * i);
    return value;
  }
  u8 byte() { return at_ == end_ ? u8(0) : *at_++; }

 private:
  const u8* at_;
  const u8* end_;
};

dr::Record read_record(Input& input, bool wide) {
  dr::Record r;
  u64* columns[] = {&r.start,     &r.length,      &r.count,   &r.code,        &r.runs,     &r.gap_chain, &r.run_chain,
                    &r.value_chain, &r.escapes, &r.rows.offset, &r.rows.run, &r.rows.step, &r.rows.pitch};
  for (u64* column : columns) *column = input.number(wide ? 8 : column == &r.code ? 3 : 1);
  return r;
}

// Memory of just the stated size, so that one byte beyond it is seen.
using Memory = std::unique_ptr<u8[]>;
Memory allocate(u64 size) { return Memory(new u8[size]()); }

// What one level makes of a delta.
struct Outcome {
  bool valid = false;
  std::vector<u64> positions;
  std::vector<u8> values, array, gathered, coming;
  dr::Lanes sums, before, after;
};

bool same(dr::Lanes a, dr::Lanes b) { return a.lane0 == b.lane0 && a.lane1 == b.lane1; }

bool same(const Outcome& a, const Outcome& b) {
  if (a.valid != b.valid) return false;
  return !a.valid || (a.positions == b.positions && a.values == b.values && a.array == b.array &&
                      a.gathered == b.gathered && a.coming == b.coming && same(a.sums, b.sums) &&
                      same(a.before, b.before) && same(a.after, b.after));
}

// An array that holds all positions of the delta from `first` on: real where they are few, else one element seen
// everywhere.
struct Array {
  Memory memory;
  u64 bytes;
  dr::View view;

  Array(const dr::Record& record, u64 first, u32 width, bool strided) {
    const u64 numel = first + record.span();
    const bool real = numel <= kMostDense;
    bytes = real ? numel * width : width;
    memory = allocate(bytes);
    for (u64 i = 0; i < bytes; ++i) memory[i] = u8(i * 37 + 11);
    view.width = width;
    view.data = memory.get();
    view.dims = 1;
    view.size[0] = numel;
    view.stride[0] = real ? dr::i64(width) : 0;
    if (real && strided) {  // backwards
      view.data += (numel - 1) * width;
      view.stride[0] = -dr::i64(width);
    }
    require(dr::collapse(view).ok(), "view");
  }
};

// Digest of listed elements, one at a time and as flat ones.
dr::Lanes sum_of(const dr::Level& level, const dr::Record& record, const u64* listed, u8* values) {
  dr::Lanes sum;
  dr::View one;
  one.width = dr::Code::unpack(record.code).width();
  one.dims = 0;
  one.numel = 1;
  for (u64 i = 0; i < record.count; ++i) {
    one.data = values + i * one.width;
    dr::Place place;
    place.start = record.low() + listed[i];
    place.key = kKey;
    sum = sum + level.digest(one, place);
  }
  return sum;
}

Outcome run(const dr::Level& level, const dr::Record& record, const dr::Pieces& pieces, u8 flags) {
  const u32 width = dr::Code::unpack(record.code).width();
  const u64 first = flags >> 4;
  Outcome out;
  out.valid = level.validate(record, pieces).ok();
  Memory positions = allocate(record.count * 8), values = allocate(record.count * width);
  u64* listed = reinterpret_cast<u64*>(positions.get());
  require(level.decode(record, pieces, listed, values.get()).ok() == out.valid, "decode and validate differ");
  Array array(record, first, width, flags & 4);
  const dr::Job job{&record, &pieces, &array.view, first};
  Memory gathered = allocate(record.count * width), coming = allocate(record.count * width);
  require(level.gather(job, gathered.get()).ok() == out.valid, "gather");
  require(level.sums(job, kKey, out.sums).ok() == out.valid, "sums");
  require(level.preview(job, kKey, out.before, out.after, coming.get()).ok() == out.valid, "preview");
  require(level.apply(job).ok() == out.valid, "apply");
  if (!out.valid) return out;
  for (u64 i = 0; i < record.count; ++i)
    require(listed[i] < record.span() && (i == 0 || listed[i - 1] < listed[i]), "positions are not ascending in range");
  require(same(out.sums, out.before), "sums and preview differ");
  require(same(out.before, sum_of(level, record, listed, gathered.get())), "the digest is not that of the positions");
  out.positions.assign(listed, listed + record.count);
  out.values.assign(values.get(), values.get() + record.count * width);
  out.gathered.assign(gathered.get(), gathered.get() + record.count * width);
  out.coming.assign(coming.get(), coming.get() + record.count * width);
  out.array.assign(array.memory.get(), array.memory.get() + array.bytes);
  if (array.view.stride[0] != 0 || array.view.dims == 0) {
    dr::Lanes now;
    require(level.sums(job, kKey, now).ok() && same(now, out.after), "preview and apply differ");
    dr::View restored;
    restored.width = width;
    restored.data = gathered.get();
    restored.dims = 1;
    restored.size[0] = record.count;
    restored.stride[0] = dr::i64(width);
    require(dr::collapse(restored).ok() && level.apply_values(job, restored).ok(), "apply_values");
    require(level.sums(job, kKey, now).ok() == true, "sums");
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, std::size_t size) {
  Input input(data, size);
  const u8 flags = input.byte();
  const dr::Record record = read_record(input, flags & 1);
  dr::Pieces pieces;
  if (!dr::list_pieces(record, pieces).ok()) return 0;
  u64 total = record.count;
  for (u32 i = 0; i < pieces.count; ++i) total += pieces.items[i].size;
  if (total > kMostBytes) return 0;
  std::vector<Memory> memory;
  std::vector<dr::Slice> slices;
  for (u32 i = 0; i < pieces.count; ++i) {
    memory.push_back(allocate(pieces.items[i].size));
    for (u64 j = 0; j < pieces.items[i].size; ++j) memory.back()[j] = input.byte();
    slices.push_back(dr::Slice{memory.back().get(), pieces.items[i].size});
  }
  require(dr::attach_slices(record, slices.data(), slices.size(), pieces).ok(), "slices of the listed sizes");
  const dr::Level* levels[dr::kMaxLevels];
  const u32 n = dr::runnable_levels(levels);
  const Outcome first = run(*levels[0], record, pieces, flags);
  for (u32 i = 1; i < n; ++i) require(same(first, run(*levels[i], record, pieces, flags)), "levels differ");
  return 0;
}
