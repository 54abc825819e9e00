// The order of work on a device. On the CPU all of this is empty: work is done when its call
// returns.
//
// Note [Streams]
// A device works off streams: queues that the host fills. A stream's work runs in order, that of
// two streams in any order, unless one waits for a mark in the other. libzero gives a device three
// kinds of stream: the user's, on which operators run and updates with them; one on which
// parameters are gathered; one on which gradients are reduced. Who hands memory from one stream to
// another marks the first where it is done (`StreamMark::record`), and lets the other wait
// (`StreamMark::wait`). The host waits for neither. Where it must know a result (`wait_on_host`)
// all that it would have enqueued meanwhile comes late; so a step has few such waits, and says how
// many.
//
// LibTorch's allocator of a device gives memory that is freed to the next who asks on the same
// stream. So memory that other streams use is kept until they are done: in a pool, with the marks
// of its last users (`StreamMarks`), and not by `record_stream`, which frees it at a time that
// nobody knows beforehand.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace zero {

/// Whether work on it goes on after the call that enqueues it has returned.
inline bool is_asynchronous(c10::Device device) { return !device.is_cpu(); }

/// The stream on which this thread enqueues work for `device`; none on the CPU.
std::optional<c10::Stream> current_stream(c10::Device device);

/// A stream beside the user's; none on the CPU.
std::optional<c10::Stream> side_stream(c10::Device device);

/// While it lives, this thread enqueues on the stream that it was given, if any.
using StreamScope = c10::OptionalStreamGuard;

/// Blocks the host until all that any thread has enqueued for `device` is done, on every stream.
void wait_for_device(c10::Device device);

/// A place in a stream: what was enqueued there before it. Empty until `record`, and always on the
/// CPU; whoever waits for an empty one goes on at once. Move-only.
class StreamMark {
 public:
  /// Marks the stream on which this thread enqueues work for `device`.
  void record(c10::Device device);
  void record(const c10::Stream& stream);
  /// What this thread enqueues from now on, on its current stream of the device, runs after what
  /// was marked. Does not block.
  void wait() const;
  /// Blocks the host until it is done.
  void wait_on_host() const;
  /// The stream that was marked.
  const std::optional<c10::Stream>& stream() const { return stream_; }

 private:
  std::optional<c10::Event> event_;
  std::optional<c10::Stream> stream_;
};

/// While it lives, this thread enqueues on `side`, after all that it has enqueued so far on its own
/// stream of that device. `mark` is kept by the caller, to be used again and again.
class SideScope {
 public:
  SideScope(const std::optional<c10::Stream>& side, StreamMark& mark);

 private:
  StreamScope on_;
};

/// What this thread enqueues from now on, on its current stream of the device, runs after all that
/// is enqueued on `side`; nothing where that is none.
void wait_for(const std::optional<c10::Stream>& side, StreamMark& mark);

/// Who has used a piece of memory last: a mark a stream.
class StreamMarks {
 public:
  /// The stream, or that on which this thread enqueues work for `device`, has used it up to now.
  void record(const c10::Stream& stream);
  void record(c10::Device device);
  /// As StreamMark::wait, for each. Forgets them.
  void wait();

 private:
  c10::SmallVector<StreamMark, 2> marks_;
};

}  // namespace zero
