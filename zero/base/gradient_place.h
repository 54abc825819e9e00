// Lets a backward function give a parameter's gradient to its collector: in its final place, so
// that no copy is needed, in tiles, or as rows.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace zero {

/// The rows of an output projection's gradient that are computed at a time. The bits of a product
/// may depend on its shape, so these are the same wherever the gradient goes.
inline constexpr int64_t kTileRows = 2048;

/// A look-up of rows that has been announced. Its operator's backward function keeps it.
struct AnnouncedLookUp : torch::CustomClassHolder {
  explicit AnnouncedLookUp(at::Tensor looked_up) : indices(std::move(looked_up)) {}
  at::Tensor indices;              ///< (...) int64
  std::atomic<bool> given{false};  ///< the backward function has run
  /// Called when the last owner has gone; a weak pointer keeps the object.
  void release_resources() override { indices.reset(); }
};

/// Takes the gradient of a weight (V, C) whose rows are looked up, while it is made: Note [Tied
/// gradient in tiles] and Note [Gradients by rows] in engine/look_up_gradient.h.
class GradientTaker {
 public:
  virtual ~GradientTaker() = default;
  /// Takes the output projection's gradient, all of it, if there is a projection. `make(begin,
  /// tile)` writes its rows from `begin` on to `tile` (rows, C). `begin` is a multiple of
  /// kTileRows, and `tile` has kTileRows rows or those that are left.
  using Make = std::function<void(int64_t begin, const at::Tensor& tile)>;
  virtual void take(const Make& make) = 0;
  /// Returns whether the gradient of this look-up is taken as rows, with `add_rows`. Otherwise it
  /// is brought whole.
  virtual bool takes(const AnnouncedLookUp& look_up) const = 0;
  /// Adds each of `rows` (n, C) to the row of the gradient that `indices` (n) names, one after the
  /// other. It is called once in a pass.
  virtual void add_rows(const at::Tensor& indices, const at::Tensor& rows) = 0;
};

/// A parameter's post-accumulate hook may hold such a place. The collector of the gradients
/// implements it together with the hook.
class GradientPlace {
 public:
  virtual ~GradientPlace() = default;
  /// Returns memory of the parameter's shape, strides and dtype. The caller overwrites it and
  /// returns it to autograd as the gradient. Returns an undefined tensor if there is no such
  /// memory: if a gradient is on its way already, or if gradients are kept in another dtype.
  virtual at::Tensor place() = 0;
  /// Returns whether it gives the gradient to a hook of the user's.
  virtual bool shows_gradient() const { return false; }
  /// Returns the value with which backward begins for a loss that is computed now: 1, or a loss
  /// scale.
  virtual double loss_factor() const { return 1; }
  /// Learns that a loss is computed now whose backward pass brings this parameter one gradient,
  /// from an output projection and then from a look-up of the rows `indices`. Returns whether the
  /// projection should be ready to give its part in tiles.
  virtual bool announce_rows(const at::Tensor& /*indices*/) { return false; }
  /// Learns that the rows `indices` are looked up now, by an operator whose backward function
  /// brings this parameter one gradient. Returns null if that is never wanted as rows.
  virtual c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(const at::Tensor& /*indices*/) {
    return {};
  }
  /// Returns the taker of tiles and rows in the backward pass under way, or null.
  virtual GradientTaker* taker() { return nullptr; }
  /// Learns that the look-up returns `gradient`, which is all of the parameter's if nothing else
  /// uses the parameter.
  virtual void returns_whole(const at::Tensor& /*gradient*/) {}
};

/// Returns memory of the shape, strides and dtype of `parameter`, with undefined values. A backward
/// function calls it just before it computes the gradient of `parameter`. The memory belongs to the
/// collector of this parameter's gradients, if there is one; otherwise it is new. A later step
/// overwrites it, so a user's tensor hook that keeps such a gradient should copy it.
at::Tensor gradient_place(const at::Tensor& parameter);

/// Returns the value with which backward will begin, as the collector of this parameter's gradients
/// knows it, or 1 without a collector. Functions that compute gradients before backward, in fp16
/// for example, compute them with this factor.
double loss_factor(const at::Tensor& parameter);

/// Returns whether a hook of the user's waits for the gradient of this parameter, which is whole
/// then.
bool shows_gradient(const at::Tensor& parameter);

/// Return what the collector of this parameter's gradients does, if there is one: see
/// GradientPlace. A gradient is given in tiles or as rows only if no hook of the user's waits for
/// it and the weight is not cast. It is in tiles if the gradients of the logits, which then stay
/// until backward, take no more memory than that of the weight: if there are no more indices than
/// columns. A look-up in a backward pass (recomputation) is not announced.
bool announce_rows(const at::Tensor& parameter, const at::Tensor& indices);
c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(const at::Tensor& parameter,
                                                     const at::Tensor& indices);
GradientTaker* gradient_taker(const at::Tensor& parameter);
void returns_whole(const at::Tensor& parameter, const at::Tensor& gradient);

}  // namespace zero
