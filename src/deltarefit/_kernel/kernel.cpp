// The Python module: argument checks, GIL, results. All work is in the levels (level.inl); see _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "dispatch.hpp"
#include "kernel_placed.hpp"
#include "python_args.hpp"
#include "record.hpp"

namespace deltarefit {
namespace {

using namespace nb::literals;

// Two arrays of one shape.
struct PairArg {
  ArrayArg older, newer;

  PairArg(nb::handle o, nb::handle n) : older(o, "old", ArrayArg::kRead), newer(n, "new", ArrayArg::kRead) {
    raise_unless_ok(collapse_pair(older.view, newer.view));
  }
};

// A delta and the array it belongs to. Before an array is written, the whole delta is validated; readers find errors
// on the way and raise then.
struct JobArg {
  DeltaArg delta;
  ArrayArg array;
  Job job;

  JobArg(nb::handle record, nb::handle slices, nb::handle object, u64 first, ArrayArg::Access access)
      : delta(record, slices), array(object, "array", access) {
    if (array.view.width != delta.width())
      raise_unless_ok(wrong("array of another element width than the delta", delta.width(), array.view.width));
    raise_unless_ok(collapse(array.view));
    const u64 numel = array.view.numel;
    const u64 span = delta.record.span();
    if (first > numel || span > numel - first)
      raise_unless_ok(
          wrong("array does not hold the delta's range from first", span, first > numel ? 0 : numel - first));
    job = Job{&delta.record, &delta.pieces, &array.view, first};
    if (access == ArrayArg::kWrite)
      without_gil([&] { return current_level().validate(delta.record, delta.pieces); });
  }
};

nb::list levels() {
  const Level* found[kMaxLevels];
  const u32 n = runnable_levels(found);
  nb::list names;
  for (u32 i = 0; i < n; ++i) names.append(found[i]->name);
  return names;
}

std::string level() { return current_level().name; }

void set_level(const std::string& name) {
  if (!use_level(name.c_str())) throw nb::value_error("no such instruction level on this CPU; see levels()");
}

u64 count_changed(nb::handle older, nb::handle newer) {
  PairArg pair(older, newer);
  u64 count = 0;
  without_gil([&] {
    count = current_level().count_changed(pair.older.view, pair.newer.view);
    return Status();
  });
  return count;
}

nb::tuple extract(nb::handle older, nb::handle newer) {
  PairArg pair(older, newer);
  ScratchLease lease;
  Scratch& scratch = *lease;
  const u64 numel = pair.older.view.numel;
  const u32 width = pair.older.view.width;
  u64 count = 0;
  without_gil([&] { return current_level().extract(pair.older.view, pair.newer.view, scratch, count); });
  u8 *positions, *olds, *news;
  nb::object results[] = {new_array(count, 8, &positions), new_array(count, width, &olds),
                          new_array(count, width, &news)};
  if (count != 0) {
    current_level().copy_positions(scratch, numel, count, reinterpret_cast<u64*>(positions));
    std::memcpy(olds, scratch.olds.data(), count * width);
    std::memcpy(news, scratch.news.data(), count * width);
  }
  return nb::make_tuple(results[0], results[1], results[2]);
}

void check_forced(const Forced& forced) {
  if (forced.kind < -1 || forced.kind > int(kAll)) raise_unless_ok(wrong("kind is not -1, 0, 1 or 2"));
  if (forced.gap_planes < -1 || forced.gap_planes == 0 || forced.gap_planes > 8)
    raise_unless_ok(wrong("gap_planes is not -1 or 1 to 8"));
  if (forced.operation < -1 || forced.operation > int(kSet)) raise_unless_ok(wrong("operation is not -1, 0, 1 or 2"));
  if (forced.packing < -1 || forced.packing > int(kTwoBit)) raise_unless_ok(wrong("packing is not -1, 0 or 1"));
  if (forced.packing == int(kTwoBit) && forced.operation != -1 && forced.operation != int(kAdd))
    raise_unless_ok(wrong("two-bit packing is for ADD only"));
}

Status check_start(u64 start, u64 numel) {
  if (start <= kMaxElements - numel) return {};
  return wrong("start lies beyond the largest tensor", kMaxElements - numel, start);
}

// Where `numel` elements lie; rows are checked.
Place place_of(u64 start, nb::handle rows, u64 key, u64 numel) {
  const Place place{start, rows_from(rows), key};
  if (!place.rows.flat()) raise_unless_ok(check_start(start, numel));
  raise_unless_ok(check_rows(place.rows, start + (numel == 0 ? 0 : numel - 1)));
  return place;
}

nb::object encode(nb::handle older, nb::handle newer, u64 start, u64 key, int kind, int gap_planes, int operation,
                  int packing, nb::handle rows) {
  const Forced forced{kind, gap_planes, operation, packing};
  check_forced(forced);
  PairArg pair(older, newer);
  const u64 numel = pair.older.view.numel;
  raise_unless_ok(check_start(start, numel));
  const Place place = place_of(start, rows, key, numel);
  if (numel == 0) return nb::none();
  ScratchLease lease;
  Scratch& scratch = *lease;
  Encoded out;
  without_gil(
      [&] { return current_level().encode(pair.older.view, pair.newer.view, place, forced, scratch, out); });
  if (out.nothing) return nb::none();
  nb::list pieces;
  for (u32 i = 0; i < out.pieces.count; ++i) {
    const Piece& piece = out.pieces.items[i];
    pieces.append(nb::make_tuple(stream_name(piece), nb::bytes(piece.data, piece.size)));
  }
  return nb::make_tuple(record_to_tuple(out.record), pieces, lanes_to_tuple(out.before), lanes_to_tuple(out.after));
}

nb::list pieces_of(nb::handle record) {
  Pieces pieces;
  raise_unless_ok(list_pieces(record_from(record), pieces));
  nb::list out;
  for (u32 i = 0; i < pieces.count; ++i) out.append(nb::make_tuple(stream_name(pieces.items[i]), pieces.items[i].size));
  return out;
}

void validate(nb::handle record, nb::handle slices) {
  DeltaArg delta(record, slices);
  without_gil([&] { return current_level().validate(delta.record, delta.pieces); });
}

nb::tuple decode(nb::handle record, nb::handle slices) {
  DeltaArg delta(record, slices);
  u8 *positions, *values;
  nb::object position_array = new_array(delta.record.count, 8, &positions);
  nb::object value_array = new_array(delta.record.count, delta.width(), &values);
  without_gil([&] {
    return current_level().decode(delta.record, delta.pieces, reinterpret_cast<u64*>(positions), values);
  });
  return nb::make_tuple(position_array, value_array);
}

void apply(nb::handle record, nb::handle slices, nb::handle array, u64 first) {
  JobArg arg(record, slices, array, first, ArrayArg::kWrite);
  without_gil([&] { return current_level().apply(arg.job); });
}

void apply_values(nb::handle record, nb::handle slices, nb::handle array, nb::handle values, u64 first) {
  ArrayArg value_arg(values, "values", ArrayArg::kRead);
  JobArg arg(record, slices, array, first, ArrayArg::kWrite);
  if (value_arg.view.width != arg.delta.width())
    raise_unless_ok(wrong("values of another element width than the delta", arg.delta.width(), value_arg.view.width));
  raise_unless_ok(collapse(value_arg.view));
  if (value_arg.view.numel != arg.delta.record.count)
    raise_unless_ok(wrong("wrong number of values", arg.delta.record.count, value_arg.view.numel));
  without_gil([&] { return current_level().apply_values(arg.job, value_arg.view); });
}

nb::object gather(nb::handle record, nb::handle slices, nb::handle array, u64 first) {
  JobArg arg(record, slices, array, first, ArrayArg::kRead);
  u8* values;
  nb::object out = new_array(arg.delta.record.count, arg.delta.width(), &values);
  without_gil([&] { return current_level().gather(arg.job, values); });
  return out;
}

nb::tuple sums(nb::handle record, nb::handle slices, nb::handle array, u64 key, u64 first) {
  JobArg arg(record, slices, array, first, ArrayArg::kRead);
  Lanes lanes;
  without_gil([&] { return current_level().sums(arg.job, key, lanes); });
  return lanes_to_tuple(lanes);
}

nb::tuple preview(nb::handle record, nb::handle slices, nb::handle array, u64 key, u64 first) {
  JobArg arg(record, slices, array, first, ArrayArg::kRead);
  Lanes before, after;
  u8* values;
  nb::object out = new_array(arg.delta.record.count, arg.delta.width(), &values);
  without_gil([&] { return current_level().preview(arg.job, key, before, after, values); });
  return nb::make_tuple(lanes_to_tuple(before), lanes_to_tuple(after), out);
}

nb::tuple digest(nb::handle array, u64 start, u64 key, nb::handle rows) {
  ArrayArg arg(array, "array", ArrayArg::kRead);
  raise_unless_ok(collapse(arg.view));
  const Place place = place_of(start, rows, key, arg.view.numel);
  Lanes lanes;
  without_gil([&] {
    lanes = current_level().digest(arg.view, place);
    return Status();
  });
  return lanes_to_tuple(lanes);
}

}  // namespace
}  // namespace deltarefit

NB_MODULE(_native, m) {
  namespace dr = deltarefit;
  namespace nb = nanobind;
  using namespace nb::literals;
  const nb::tuple flat = nb::make_tuple(0, 0, 0, 0);
  m.def("levels", &dr::levels);
  m.def("level", &dr::level);
  m.def("use_level", &dr::set_level, "name"_a);
  m.def("count_changed", &dr::count_changed, "old"_a, "new"_a);
  m.def("extract", &dr::extract, "old"_a, "new"_a);
  m.def("encode", &dr::encode, "old"_a, "new"_a, "start"_a, "key"_a, "kind"_a = -1, "gap_planes"_a = -1,
        "operation"_a = -1, "packing"_a = -1, "rows"_a = flat);
  m.def("pieces", &dr::pieces_of, "record"_a);
  m.def("validate", &dr::validate, "record"_a, "slices"_a);
  m.def("decode", &dr::decode, "record"_a, "slices"_a);
  m.def("apply", &dr::apply, "record"_a, "slices"_a, "array"_a, "first"_a = 0);
  m.def("apply_values", &dr::apply_values, "record"_a, "slices"_a, "array"_a, "values"_a, "first"_a = 0);
  m.def("gather", &dr::gather, "record"_a, "slices"_a, "array"_a, "first"_a = 0);
  m.def("sums", &dr::sums, "record"_a, "slices"_a, "array"_a, "key"_a, "first"_a = 0);
  m.def("preview", &dr::preview, "record"_a, "slices"_a, "array"_a, "key"_a, "first"_a = 0);
  m.def("digest", &dr::digest, "array"_a, "start"_a, "key"_a, "rows"_a = flat);
  dr::add_placed(m);
}
