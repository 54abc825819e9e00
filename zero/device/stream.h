// The order of work on a device. On the CPU all of this does nothing: work is done when its call
// returns.
//
// Note [Streams]
// A device works off streams: queues that the host fills. The work of one stream runs in order; two
// streams have no common order, unless one waits for a mark in the other. libzero gives a device
// three kinds of stream: the user's, on which operators and updates run; one on which parameters
// are gathered; one on which gradients are reduced. To hand memory from one stream to another, the
// host marks the first where it is done (`StreamMark::record`), and lets the other wait
// (`StreamMark::wait`). The host itself waits for neither. If it must know a result
// (`wait_on_host`), all that it would have enqueued meanwhile comes late; so a step has few such
// waits, and says how many.
//
// LibTorch's allocator gives a device's freed memory to the next request on the same stream. So
// memory that other streams use is kept until they are done: in a pool, with the marks of its last
// users (`StreamMarks`), and not by `record_stream`, which frees it at a time that nobody knows
// beforehand.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace zero {

/// Returns true if work on the device goes on after the call that enqueues it has returned.
inline bool is_asynchronous(c10::Device device) { return !device.is_cpu(); }

/// Returns the stream on which this thread enqueues work for `device`; none on the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

/// Returns a stream beside the user's; none on the CPU.
std::optional<c10::Stream> side_stream(c10::Device device);

/// While a scope lives, this thread enqueues on the stream that the scope was given, if any.
using StreamScope = c10::OptionalStreamGuard;

/// Blocks the host until all that any thread has enqueued for `device` is done, on every stream.
void wait_for_device(c10::Device device);

/// A place in a stream: after the work that was enqueued there before. Empty until `record`, and
/// always on the CPU; nobody waits for an empty one. Move-only.
class StreamMark {
 public:
  /// Marks the stream on which this thread enqueues work for `device`.
  void record(c10::Device device);
  void record(const c10::Stream& stream);
  /// Lets all that this thread enqueues from now on, on its current stream of the device, run after
  /// the marked work. Does not block.
  void wait() const;
  /// Blocks the host until the marked work is done.
  void wait_on_host() const;
  /// Returns the stream that was marked.
  const std::optional<c10::Stream>& stream() const { return stream_; }

 private:
  std::optional<c10::Event> event_;
  std::optional<c10::Stream> stream_;
};

/// While a scope lives, this thread enqueues on `side`, after all that it has enqueued so far on
/// its own stream of that device. The caller keeps `mark`, to use it again and again.
class SideScope {
 public:
  SideScope(const std::optional<c10::Stream>& side, StreamMark& mark);

 private:
  StreamScope on_;
};

/// Lets all that this thread enqueues from now on, on its current stream of the device, run after
/// all that is enqueued on `side`. Does nothing if that is none.
void wait_for(const std::optional<c10::Stream>& side, StreamMark& mark);

/// The last users of a piece of memory: a mark for each stream.
class StreamMarks {
 public:
  /// Says that the stream, or that on which this thread enqueues work for `device`, has used it up
  /// to now.
  void record(const c10::Stream& stream);
  void record(c10::Device device);
  /// Waits for each as StreamMark::wait does, and forgets them.
  void wait();

 private:
  c10::SmallVector<StreamMark, 2> marks_;
};

}  // namespace zero
