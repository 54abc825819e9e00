// How one call's values cross between hosts. A codec makes the messages that a host sends, reads
// those that it receives, and adds up the values of several hosts.
//
//   raw         The message is the values themselves.
//   quantised   The message has a few bits for each value (Note [Quantised messages] in
//               quantise_kernels.h). Values are rounded.
//   exponents   The message has the values' exponents packed (Note [Packed exponents] in
//               packed_exponents.h). No bit is lost, but a message may have too little room: then
//               the end of the values, the rest, follows in a message of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "zero/comm/link_wire.h"

namespace zero::comm {

/// The place of a message among those of one sum. With feedback (LinkWire::error) it tells which
/// stretch of the errors belongs to the message.
struct SumMessage {
  int peer = 0;             ///< the receiving host, counted from 0 among the others
  int64_t slice_numel = 0;  ///< the elements that each of them receives in all
  int64_t begin = 0;        ///< the message's first element in that slice
};

/// A codec serves one call. All its functions are const and may run on two threads at once.
class Codec {
 public:
  Codec(at::ScalarType dtype, int64_t width, int64_t block)
      : dtype_(dtype), width_(width), block_(block) {}
  virtual ~Codec() = default;
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  /// The dtype of the values.
  at::ScalarType dtype() const { return dtype_; }
  /// Returns how many values make a chunk, so that they, or their sums, fit into an array of
  /// `chunk_bytes`. Chunks begin where blocks do, so their messages together have the bytes of one
  /// message.
  int64_t chunk_numel(int64_t chunk_bytes) const { return chunk_bytes / width_ / block_ * block_; }
  /// Returns the bytes of a message of `numel` values.
  virtual int64_t message_bytes(int64_t numel) const = 0;
  /// Returns true if the message is the values themselves: then a sum is best computed in the place
  /// that its message leaves from, and `pack` copies nothing.
  virtual bool is_raw() const { return false; }
  /// message = values. Returns the rest: the values' last bytes that found no room in the message,
  /// mostly none. `of` is given if the values are a part of a sum.
  virtual std::span<const std::byte> pack(std::byte* message, const at::Tensor& values,
                                          const std::optional<SumMessage>& of = {}) const = 0;
  /// values = message. Returns the place of the rest, which the caller receives; mostly it is
  /// empty.
  virtual std::span<std::byte> unpack(const at::Tensor& values, const std::byte* message) const = 0;
  /// own = the values that the receivers of `message`, which was made of `values`, read.
  virtual void read_back(const at::Tensor& own, const at::Tensor& values,
                         const std::byte* message) const;

  /// Memory for `add`: two arrays of a chunk each, in fp32. `converted` may hold this host's term.
  struct Room {
    float* total = nullptr;
    float* converted = nullptr;
  };
  /// Returns true if `add` takes the messages as they came; false if they are unpacked first.
  virtual bool adds_messages() const { return true; }
  /// output = the sum of the terms of all hosts, added in the order of hosts and rounded once.
  /// terms[host] is that host's message, or its values if `adds_messages` is false; terms[own_host]
  /// is values always.
  virtual void add(const at::Tensor& output, std::span<const std::byte* const> terms, int own_host,
                   const Room& room) const;

 private:
  at::ScalarType dtype_;
  int64_t width_;  // bytes that a value takes up in the arrays of a chunk
  int64_t block_;  // values that are coded together
};

/// Makes the codec of values of `dtype` that cross by `wire`; without a wire, the raw codec.
std::unique_ptr<Codec> make_codec(const std::optional<LinkWire>& wire, at::ScalarType dtype);

/// output = the sum of the inputs, arrays of `dtype`, on all threads. For `block` see comm::sum.
void add_arrays(const at::Tensor& output, std::span<const std::byte* const> inputs,
                at::ScalarType dtype, int64_t block);

}  // namespace zero::comm
