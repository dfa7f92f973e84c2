// Deltas and storages through tables of boxes: argument checks, GIL, results; see _native.pyi.
#include "kernel_placed.hpp"

#include <limits>

#include "dispatch.hpp"
#include "python_args.hpp"
#include "record.hpp"

namespace deltarefit {
namespace {

using namespace nb::literals;

// A whole storage, and the table of what it holds of one tensor.
struct StorageArg {
  ArrayArg array;
  Boxes boxes;
  PlacedJob job;

  StorageArg(nb::handle storage, nb::handle table, u64 shift, ArrayArg::Access access)
      : array(storage, "storage", access) {
    const View& view = array.view;
    if (shift != 0 && shift != 16) raise_unless_ok(wrong("shift is not 0 or 16"));
    if (shift != 0 && view.width != 4)
      raise_unless_ok(wrong("storage of shifted elements of another width", 4, view.width));
    if (view.dims != 1) raise_unless_ok(wrong("storage has another number of dimensions", 1, view.dims));
    if (view.size[0] > 1 && view.stride[0] != i64(view.width)) raise_unless_ok(wrong("storage is not contiguous"));
    boxes_from(table, view.size[0], boxes);
    job = PlacedJob{nullptr, nullptr, &boxes, view.data, shift == 0 ? view.width : 2, shift != 0};
  }
};

// A delta and the storage it belongs into. What is written is validated first: the table, the whole delta, and that
// widened elements can be shifted back.
struct PlacedArg {
  DeltaArg delta;
  StorageArg storage;
  bool met;  // some listed position may be in a box

  PlacedArg(nb::handle record, nb::handle slices, nb::handle object, nb::handle table, u64 shift,
            ArrayArg::Access access)
      : delta(record, slices), storage(object, table, shift, access) {
    if (storage.job.width != delta.width())
      raise_unless_ok(wrong("storage of another element width than the delta", delta.width(), storage.job.width));
    storage.job.record = &delta.record;
    storage.job.pieces = &delta.pieces;
    met = any_box_meets(storage.boxes, delta.record.low(), delta.record.low() + delta.record.span() - 1);
    if (access == ArrayArg::kWrite) without_gil([&] { return current_level().place_validate(storage.job); });
  }
};

u64 place_apply(nb::handle record, nb::handle slices, nb::handle storage, nb::handle boxes, u64 shift) {
  PlacedArg arg(record, slices, storage, boxes, shift, ArrayArg::kWrite);
  u64 hits = 0;
  if (arg.met) without_gil([&] { return current_level().place_apply(arg.storage.job, hits); });
  return hits;
}

nb::tuple place_sums(nb::handle record, nb::handle slices, nb::handle storage, nb::handle boxes, u64 key, u64 shift) {
  PlacedArg arg(record, slices, storage, boxes, shift, ArrayArg::kRead);
  Lanes lanes;
  without_gil([&] { return current_level().place_sums(arg.storage.job, key, lanes); });
  return lanes_to_tuple(lanes);
}

nb::tuple place_preview(nb::handle record, nb::handle slices, nb::handle storage, nb::handle boxes, u64 key,
                        u64 shift) {
  PlacedArg arg(record, slices, storage, boxes, shift, ArrayArg::kRead);
  Lanes before, after;
  without_gil([&] { return current_level().place_preview(arg.storage.job, key, before, after); });
  return nb::make_tuple(lanes_to_tuple(before), lanes_to_tuple(after));
}

nb::tuple place_digest(nb::handle storage, nb::handle boxes, u64 key, u64 shift) {
  StorageArg arg(storage, boxes, shift, ArrayArg::kRead);
  Lanes lanes;
  without_gil([&] { return current_level().place_digest(arg.job, key, lanes); });
  return lanes_to_tuple(lanes);
}

nb::tuple place_decode(nb::handle record, nb::handle slices, nb::handle table) {
  DeltaArg delta(record, slices);
  Boxes boxes;
  boxes_from(table, u64(std::numeric_limits<i64>::max()), boxes);
  const PlacedJob job{&delta.record, &delta.pieces, &boxes, nullptr, delta.width(), false};
  u64 hits = 0;
  without_gil([&] { return current_level().place_decode(job, hits, nullptr, nullptr, nullptr); });
  u8 *positions, *offsets, *values;
  nb::object results[] = {new_array(hits, 8, &positions), new_array(hits, 8, &offsets),
                          new_array(hits, delta.width(), &values)};
  if (hits != 0)
    without_gil([&] {
      return current_level().place_decode(job, hits, reinterpret_cast<u64*>(positions),
                                          reinterpret_cast<u64*>(offsets), values);
    });
  return nb::make_tuple(results[0], results[1], results[2]);
}

}  // namespace

void add_placed(nb::module_& m) {
  m.def("place_apply", &place_apply, "record"_a, "slices"_a, "storage"_a, "boxes"_a, "shift"_a = 0);
  m.def("place_sums", &place_sums, "record"_a, "slices"_a, "storage"_a, "boxes"_a, "key"_a, "shift"_a = 0);
  m.def("place_preview", &place_preview, "record"_a, "slices"_a, "storage"_a, "boxes"_a, "key"_a, "shift"_a = 0);
  m.def("place_digest", &place_digest, "storage"_a, "boxes"_a, "key"_a, "shift"_a = 0);
  m.def("place_decode", &place_decode, "record"_a, "slices"_a, "boxes"_a);
}

}  // namespace deltarefit
