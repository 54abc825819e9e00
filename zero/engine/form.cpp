#include "zero/engine/form.h"

#include "zero/comm/packed_exponents.h"
#include "zero/comm/quantise_kernels.h"
#include "zero/comm/reduce_kernels.h"

namespace zero {

namespace {

LinkForm link_form(bool quantised, comm::Quantisation quantisation, bool packed,
                   at::ScalarType dtype) {
  using Coding = LinkForm::Coding;
  if (quantised && comm::can_quantise(dtype)) return {Coding::quantised, quantisation};
  if (packed && comm::can_pack_exponents(dtype)) return {.coding = Coding::packed_exponents};
  return {};
}

GradientForm gradient_form(const Config& config, const FormSettings& settings, const Form& form,
                           Tier gradients_at) {
  const auto& sharded = settings.sharded;
  const auto& grid = settings.ranks.grid;
  const auto& links = config.quantised;
  const bool replicated = grid.replicas() > 1;
  // The array is a bucket of one pass, and not one in which several passes add up.
  const bool of_one_pass = sharded.gradients && !config.layer_major_accumulation;
  const auto usual = of_one_pass ? form.dtype : form.gradient_dtype;
  const bool divides = config.gradient_predivisor(grid.ranks(), sharded.gradients) != 1;
  const bool sends = grid.ranks() > 1;
  const auto chosen = sends && config.communication_dtype
                          ? std::optional(dtype_of(*config.communication_dtype))
                          : std::nullopt;

  GradientForm gradients;
  gradients.collected = of_one_pass && !divides ? chosen.value_or(usual) : usual;
  gradients.reduced = chosen.value_or(usual);
  gradients.rounds = c10::elementSize(gradients.reduced) < c10::elementSize(usual);
  // A sum that goes to the host, to a disk or to an update at once cannot be deferred.
  gradients.defers = replicated && of_one_pass && config.gradient_accumulation_steps > 1 &&
                     !settings.in_backward && gradients_at == Tier::device;
  gradients.link =
      link_form(links.gradients && sharded.gradients, {links.gradients_format, links.block},
                config.packed_exponents && sharded.optimizer, gradients.reduced);
  if (gradients_at == Tier::host && grid.ranks() == 1) {
    gradients.sums = {gradients.reduced, gradients.reduced};
  } else {
    gradients.sums = {form.gradient_dtype, at::kFloat};
  }
  gradients.partial = gradients.defers   ? gradients.sum_dtype(true)
                      : grid.shards == 1 ? gradients.reduced
                                         : comm::partial_dtype(gradients.reduced);
  const auto sent = [](at::ScalarType array, at::ScalarType sum, bool widens) {
    return widens && c10::elementSize(sum) > c10::elementSize(array) ? sum : array;
  };
  for (const size_t pass : {0, 1}) {
    const auto in_shard_group = replicated && !gradients.defers ? gradients.partial
                                : sharded.gradients             ? gradients.sums[pass]
                                                                : form.gradient_dtype;
    gradients.sent_in_shard_group[pass] =
        sent(gradients.reduced, in_shard_group,
             settings.ranks.widens_in_shard_group && sharded.optimizer);
    gradients.sent_to_replicas[pass] =
        sent(gradients.partial, gradients.sums[pass], settings.ranks.widens_to_replicas);
  }
  return gradients;
}

}  // namespace

std::optional<comm::LinkWire> LinkForm::wire() const {
  if (coding == Coding::quantised) return comm::LinkWire{.quantisation = quantisation};
  if (coding == Coding::packed_exponents) return comm::LinkWire{.packed = true};
  return {};
}

partition::Wire LinkForm::counted(at::ScalarType dtype) const {
  if (coding == Coding::quantised) {
    return {.bits = quantisation.format == comm::WireFormat::int4 ? 4 : 8,
            .block = quantisation.block};
  }
  return {.bits = 8 * static_cast<int64_t>(c10::elementSize(dtype)),
          .packed = coding == Coding::packed_exponents};
}

at::ScalarType Form::moment_dtype() const {
  return moment_format == optim::StateFormat::eight_bit ? at::kByte
         : moment_format == optim::StateFormat::bf16    ? at::kBFloat16
                                                        : at::kFloat;
}

at::ScalarType Form::dtype_of(State state) const {
  return state == State::parameters  ? dtype
         : state == State::gradients ? gradient_dtype
         : state == State::master    ? master_dtype()
                                     : moment_dtype();
}

Form form_of(const Config& config, const FormSettings& settings, at::ScalarType dtype,
             bool trainable, Tier gradients_at) {
  const auto& links = config.quantised;
  Form form;
  form.dtype = dtype;
  form.gradient_dtype = config.accumulates_fp32() ? at::kFloat : dtype;
  form.split = config.split_master_weights && dtype == at::kBFloat16 && trainable;
  form.narrow = config.bf16_master_weights_and_grads && dtype == at::kBFloat16;
  form.moment_format = config.states_of(dtype);
  const bool quantised = trainable ? links.weights : links.frozen_weights;
  form.parameter_link =
      link_form(quantised && settings.sharded.parameters, {links.weights_format, links.block},
                config.packed_exponents, dtype);
  if (trainable) form.gradients = gradient_form(config, settings, form, gradients_at);
  return form;
}

}  // namespace zero
