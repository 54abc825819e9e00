// How a checkpoint is saved.
#pragma once

#include <cstdint>

namespace zero {

struct SaveOptions {
  /// Saves beside the steps that follow: Note [Saving beside training] in background_save.h.
  bool background = false;
  /// The most bytes of host memory for copies of states that a step is about to change and that are
  /// not in the file yet. A step waits for the file where they do not suffice. The copies of
  /// parameters and buffers are not among them.
  int64_t staging_bytes = int64_t{256} << 20;
};

/// How far a rank is with a save in the background. Rank 0 has `written` its part when the files of
/// all ranks are there and the folder has its name.
enum class SaveProgress : uint8_t { none, under_way, written, failed };

}  // namespace zero
