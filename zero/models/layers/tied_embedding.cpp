#include "zero/models/layers/tied_embedding.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/base/row_embedding.h"
#include "zero/base/weight_use.h"
#include "zero/models/layers/matmul.h"

namespace zero {
namespace {

// Autograd takes tensors for inputs only where they are arguments, and not in here.
struct Slot {
  at::Tensor gradient;
  at::Tensor rows;  // of the weight; undefined: it is to be read
};

class TiedEmbedding : public torch::autograd::Function<TiedEmbedding> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight,
                            const at::Tensor& indices, const Slot& slot, int64_t padding) {
    context->saved_data["indices"] = indices;
    context->saved_data["slot"] = slot.gradient;
    context->saved_data["weight"] = weight;
    context->saved_data["padding"] = padding;
    return slot.rows.defined() ? slot.rows : at::embedding(weight, indices);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto& saved = context->saved_data;
    if (saved.empty()) {
      throw Error(
          "backward ran a second time through the embedding of a tied weight, whose gradient it "
          "gave away in the first. Compute the loss again.");
    }
    const auto indices = saved.at("indices").toTensor();
    const auto weight = saved.at("weight").toTensor();
    const auto padding = saved.at("padding").toInt();
    auto gradient = saved.at("slot").toTensor();
    saved.clear();  // so that autograd holds the gradient alone, and need not copy it
    auto* taker = gradient.numel() == 0 ? gradient_taker(weight) : nullptr;
    if (gradient.numel() == 0 && taker == nullptr) {
      return {at::embedding_dense_backward(gradients[0], indices, weight.size(0), padding, false),
              {},
              {},
              {}};
    }
    const auto of_rows = gradient_rows(gradients[0], indices, padding);
    const auto of = indices.reshape({-1});
    if (taker != nullptr) {
      taker->add_rows(of, of_rows);
      return {{}, {}, {}, {}};
    }
    gradient.index_add_(0, of, of_rows);
    returns_whole(weight, gradient);
    return {std::move(gradient), {}, {}, {}};
  }
};

}  // namespace

at::Tensor gradient_slot(const at::Tensor& weight, bool made_in_backward) {
  const auto options = at::TensorOptions().dtype(weight.scalar_type()).device(weight.device());
  if (made_in_backward) return at::empty({0}, options);
  // It is resized to keep the memory, which linear_cross_entropy may need for some more rows.
  return at::empty({padded_rows(weight), weight.size(1)}, options).resize_({0});
}

at::Tensor tied_embedding(const at::Tensor& weight, const at::Tensor& indices,
                          const at::Tensor& slot, int64_t padding) {
  return TiedEmbedding::apply(weight, indices, Slot{slot, look_up_rows(weight, indices)}, padding);
}

}  // namespace zero
