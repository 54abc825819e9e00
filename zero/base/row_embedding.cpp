#include "zero/base/row_embedding.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "zero/base/gradient_place.h"
#include "zero/base/weight_use.h"

namespace zero {
namespace {

// Apart from the tensors that autograd looks at.
struct Rows {
  at::Tensor found;
};

class RowEmbedding : public torch::autograd::Function<RowEmbedding> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight,
                            const at::Tensor& indices, const Rows& rows, int64_t padding) {
    context->save_for_backward({indices});
    context->saved_data["weight"] = weight;  // its bytes may go meanwhile
    context->saved_data["padding"] = padding;
    return rows.found.defined() ? rows.found : at::embedding(weight, indices, padding);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto indices = context->get_saved_variables().front();
    const auto weight = context->saved_data.at("weight").toTensor();
    const auto padding = context->saved_data.at("padding").toInt();
    if (auto* taker = gradient_tiles(weight)) {
      taker->add_rows(indices.reshape({-1}), gradient_rows(gradients[0], indices, padding));
      return {{}, {}, {}, {}};
    }
    auto whole =
        at::embedding_dense_backward(gradients[0], indices, weight.size(0), padding, false);
    returns_whole(weight, whole);
    return {std::move(whole), {}, {}, {}};
  }
};

}  // namespace

at::Tensor row_embedding(const at::Tensor& weight, const at::Tensor& indices, int64_t padding) {
  if (!at::GradMode::is_enabled() || !weight.requires_grad() || !announce_look_up(weight, indices))
    return {};
  return RowEmbedding::apply(weight, indices, Rows{look_up_rows(weight, indices)}, padding);
}

at::Tensor gradient_rows(const at::Tensor& rows, const at::Tensor& indices, int64_t padding) {
  auto flat = rows.reshape({-1, rows.size(-1)});
  if (padding >= 0) flat = flat.masked_fill(indices.reshape({-1}).eq(padding).unsqueeze(1), 0);
  return flat;
}

}  // namespace zero
