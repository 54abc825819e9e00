// A scope in which parameters are present in full: for reading or writing them without operators,
// or in several steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "zero/engine/engine.h"

namespace zero {

/// While it lives, the given parameters of an engine have all their bytes on this rank: raw
/// pointers, torch::save and third-party code work on them. At stages 0 to 2 they always have; the
/// scope then only carries writes to the states that belong to them. Operators that write a
/// parameter between steps need no scope; writes that leave no trace in its version (raw pointers,
/// Tensor::data) do.
///
///   {
///     zero::Gathered scope(engine, model->parameters(), zero::Gathered::Access::write);
///     torch::load(model, "pretrained.pt");
///   }
class Gathered {
 public:
  enum class Access : uint8_t {
    read,   ///< do not write: it would be lost or stay local
    write,  ///< closing commits the writes: collective
  };

  /// Gathers `parameters` (all of the engine's if empty). Opening for writing completes a delayed
  /// update under way, so it is collective. Reading needs no other rank if gathers are one-sided,
  /// and is collective elsewhere. With `modifier_rank`, closing gives that rank's values to all;
  /// without it, every rank must have written the same. Throws ConfigError for a tensor that is no
  /// parameter of `engine`.
  Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, Access access = Access::read,
           std::optional<int> modifier_rank = std::nullopt);
  /// Closes the scope. Throws the errors of `close`, unless another exception is under way.
  ~Gathered() noexcept(false);
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

  /// Commits and releases now. A second call does nothing.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  int exceptions_;
};

}  // namespace zero
