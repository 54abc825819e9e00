// The rows of the section `optimizer`.
#include "zero/config/fields.h"

namespace zero::fields {

namespace {

enum class Type { adam, adamw, sgd };

/// The section itself.
struct Section {
  Type type = Type::adamw;
  Json params = Json::object();
};

}  // namespace

template <>
struct Choices<Type> {
  static constexpr std::pair<std::string_view, Type> list[] = {
      {"Adam", Type::adam}, {"AdamW", Type::adamw}, {"SGD", Type::sgd}};
};

template <>
const std::vector<Field<AdamW>>& hyper_parameters<AdamW>() {
  static const auto rows = [] {
    std::vector<Field<AdamW>> all{
        field<AdamW>(
            "lr",
            {.sentence = "Learning rate; of `zero train` the peak", .option = "--lr", .least = 0},
            &AdamW::lr),
        {Spec{"betas",
              {.sentence = "Decay rates of the two moments, each at least 0 and less than 1"},
              Kind::pair},
         [](AdamW& adam, const Json& value) {
           adam.beta1 = value[0].get<double>();
           adam.beta2 = value[1].get<double>();
         },
         [](const AdamW& adam) {
           return Json::array({adam.beta1, adam.beta2});
         }},
        field<AdamW>(
            "", {.sentence = "AdamW's first moment", .option = "--beta1", .least = 0, .below = 1},
            &AdamW::beta1),
        field<AdamW>(
            "", {.sentence = "AdamW's second moment", .option = "--beta2", .least = 0, .below = 1},
            &AdamW::beta2),
        field<AdamW>("eps", {.sentence = "Added to the root of the second moment", .least = 0},
                     &AdamW::eps),
        field<AdamW>("weight_decay",
                     {.sentence = "Weight decay; in `zero train` of matrices, biases and norms "
                                  "have none",
                      .details = "\"Adam\" has 0 where it is left out.",
                      .option = "--weight-decay",
                      .least = 0},
                     &AdamW::weight_decay),
        field<AdamW>("adam_w_mode",
                     {.sentence = "Decay acts on the weight and not on the gradient (AdamW)"},
                     &AdamW::decoupled),
        field<AdamW>("bias_correction",
                     {.sentence = "The moments are corrected for their start at 0"},
                     &AdamW::bias_correction),
        accepted<AdamW, bool>("torch_adam", {.sentence = "Accepted, without effect"})};
    return all;
  }();
  return rows;
}

template <>
const std::vector<Field<Sgd>>& hyper_parameters<Sgd>() {
  static const std::vector<Field<Sgd>> rows{
      field<Sgd>(
          "lr",
          {.sentence = "Learning rate; of `zero train` the peak", .option = "--lr", .least = 0},
          &Sgd::lr),
      field<Sgd>("momentum", {.sentence = "Of the running sum of gradients", .least = 0},
                 &Sgd::momentum),
      field<Sgd>("dampening", {.sentence = "What of a gradient does not enter that sum"},
                 &Sgd::dampening),
      field<Sgd>("weight_decay",
                 {.sentence = "Weight decay; in `zero train` of matrices, biases and norms have "
                              "none",
                  .option = "--weight-decay",
                  .least = 0},
                 &Sgd::weight_decay),
      field<Sgd>("nesterov", {.sentence = "Nesterov's form; needs `momentum`, and `dampening` 0"},
                 &Sgd::nesterov)};
  return rows;
}

Optimizer read_optimizer(const Json& section) {
  static const std::vector<Field<Section>> rows{
      field<Section>("type", {.sentence = ""}, &Section::type),
      {Spec{"params", {.sentence = ""}, Kind::section},
       [](Section& read_into, const Json& value) { read_into.params = value; }}};
  Section named;
  read(named, rows, section, "optimizer.");
  const std::string prefix = "optimizer.params.";
  if (named.type == Type::sgd) {
    Sgd sgd;
    read(sgd, hyper_parameters<Sgd>(), named.params, prefix);
    return sgd;
  }
  AdamW adam;
  // As in DeepSpeed: "Adam" decays like AdamW unless adam_w_mode is false, and without a default
  // decay.
  if (named.type == Type::adam) adam.weight_decay = 0;
  read(adam, hyper_parameters<AdamW>(), named.params, prefix);
  return adam;
}

Json write_optimizer(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& chosen) {
        using Chosen = std::remove_cvref_t<decltype(chosen)>;
        return Json{{"type", std::is_same_v<Chosen, Sgd> ? "SGD" : "AdamW"},
                    {"params", write(chosen, hyper_parameters<Chosen>())}};
      },
      optimizer);
}

}  // namespace zero::fields
