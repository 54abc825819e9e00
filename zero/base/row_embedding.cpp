#include "zero/base/row_embedding.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "zero/base/gradient_place.h"
#include "zero/base/weight_use.h"

namespace zero {
namespace {

// Autograd takes tensors for inputs only where they are arguments, and not in here.
struct Found {
  at::Tensor rows;
  c10::intrusive_ptr<AnnouncedLookUp> announced;
};

class RowEmbedding : public torch::autograd::Function<RowEmbedding> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight,
                            const at::Tensor& indices, const Found& found, int64_t padding) {
    context->set_materialize_grads(false);
    context->save_for_backward({indices});
    context->saved_data["weight"] = weight;  // its bytes may go meanwhile
    context->saved_data["padding"] = padding;
    context->saved_data["announced"] = at::IValue::make_capsule(found.announced);
    return found.rows;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto indices = context->get_saved_variables().front();
    const auto& saved = context->saved_data;
    const auto weight = saved.at("weight").toTensor();
    const auto padding = saved.at("padding").toInt();
    const auto capsule = saved.at("announced").toCapsule();
    auto& announced = static_cast<AnnouncedLookUp&>(*capsule);
    auto* taker = gradient_taker(weight);
    const bool as_rows = taker != nullptr && taker->takes(announced);
    announced.given = true;
    if (!gradients[0].defined()) return {{}, {}, {}, {}};  // then the weight has none either
    if (as_rows) {
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
  auto rows = try_row_embedding(weight, indices, padding);
  return rows.defined() ? rows : at::embedding(weight, indices, padding);
}

at::Tensor try_row_embedding(const at::Tensor& weight, const at::Tensor& indices, int64_t padding) {
  if (!at::GradMode::is_enabled() || !weight.requires_grad()) return {};
  const auto announced = announce_look_up(weight, indices);
  if (!announced) return {};
  auto rows = look_up_rows(weight, indices);
  // Gradients are on here, but not in `forward`: the pager tells steps from evaluations by that.
  if (!rows.defined()) rows = at::embedding(weight.detach(), indices, padding);
  return RowEmbedding::apply(weight, indices, Found{rows, announced}, padding);
}

at::Tensor gradient_rows(const at::Tensor& rows, const at::Tensor& indices, int64_t padding) {
  auto flat = rows.reshape({-1, rows.size(-1)});
  if (padding >= 0) flat = flat.masked_fill(indices.reshape({-1}).eq(padding).unsqueeze(1), 0);
  return flat;
}

}  // namespace zero
