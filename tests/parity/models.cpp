#include "tests/parity/models.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include "zero/models/gpt2/gpt2.h"
#include "zero/models/llama/llama.h"

namespace zero::parity {

namespace nn = torch::nn;

at::Tensor values(at::IntArrayRef sizes, int rank, int64_t micro_batch) {
  const auto positions = torch::arange(c10::multiply_integers(sizes), at::kDouble);
  return torch::sin(positions * 12.9898 + rank * 7.13 + static_cast<double>(micro_batch) * 3.7)
      .to(at::kFloat)
      .view(sizes);
}

at::Tensor tokens(at::IntArrayRef sizes, int64_t vocabulary, int rank, int64_t micro_batch) {
  const auto positions = torch::arange(c10::multiply_integers(sizes), at::kLong);
  return ((positions * 7919 + rank * 104729 + micro_batch * 1299709) % 1000003 % vocabulary)
      .view(sizes);
}

Recipe gpt2() {
  return [](at::ScalarType) -> Subject {
    Gpt2Config config;
    config.vocab_size = 97;
    config.context = 24;
    config.width = 39;
    config.heads = 3;
    config.layers = 2;
    config.set_dropout(0.1);
    Gpt2 model(config);
    return {named_tensors(model),
            [model](int rank, int64_t micro_batch) mutable {
              const auto batch = tokens({2, 18}, 97, rank, micro_batch);
              return model->loss(batch.narrow(1, 0, 17).contiguous(),
                                 batch.narrow(1, 1, 17).contiguous());
            },
            model.ptr()};
  };
}

namespace {

template <class Module>
Subject subject(std::shared_ptr<Module> model,
                std::function<at::Tensor(Module&, int, int64_t)> loss) {
  return {named_tensors(model),
          [model, loss](int rank, int64_t micro_batch) { return loss(*model, rank, micro_batch); },
          model};
}

struct LstmModel : nn::Module {
  LstmModel()
      : lstm(register_module("lstm", nn::LSTM(nn::LSTMOptions(7, 11).num_layers(2)))),
        head(register_module("head", nn::Linear(11, 3))) {}
  nn::LSTM lstm;
  nn::Linear head;
};

struct ConvolutionModel : nn::Module {
  ConvolutionModel()
      : conv(register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 5, 3)))),
        norm(register_module("norm", nn::BatchNorm2d(5))),
        head(register_module("head", nn::Linear(5 * 4 * 4, 2))) {}
  nn::Conv2d conv;
  nn::BatchNorm2d norm;
  nn::Linear head;
};

struct MixtureModel : nn::Module {
  MixtureModel()
      : in(register_module("in", nn::Linear(9, 13))),
        out(register_module("out", nn::Linear(13, 1))) {
    for (int i = 0; i < 5; ++i)
      experts.push_back(register_module("expert" + std::to_string(i), nn::Linear(13, 13)));
  }
  nn::Linear in;
  nn::Linear out;
  std::vector<nn::Linear> experts;
};

struct TiedModel : nn::Module {
  TiedModel()
      : layer(register_module("layer", nn::Linear(11, 11))),
        again(register_module("again", layer)),
        head(register_module("head", nn::Linear(11, 1))) {}
  nn::Linear layer;
  nn::Linear again;
  nn::Linear head;
};

}  // namespace

std::vector<NamedRecipe> other_models() {
  // Grouped queries, norms of heads, a window, and tied embeddings of which one is not trained.
  const auto llama = [](at::ScalarType) -> Subject {
    Llama model(LlamaConfig::from_json(R"({"model_type": "qwen3", "vocab_size": 61,
        "hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 3,
        "tie_word_embeddings": true, "use_sliding_window": true, "sliding_window": 5,
        "max_window_layers": 1})",
                                       "qwen3"));
    return {named_tensors(model),
            [model](int rank, int64_t micro_batch) mutable {
              const auto batch = tokens({2, 14}, 61, rank, micro_batch);
              return model->loss(batch.narrow(1, 0, 13).contiguous(),
                                 batch.narrow(1, 1, 13).contiguous());
            },
            model.ptr()};
  };
  const auto lstm = [](at::ScalarType dtype) {
    return subject<LstmModel>(
        std::make_shared<LstmModel>(), [dtype](LstmModel& m, int rank, int64_t micro) {
          const auto out = std::get<0>(m.lstm(values({5, 2, 7}, rank, micro).to(dtype)));
          return m.head(out).to(at::kFloat).pow(2).mean();
        });
  };
  const auto convolution = [](at::ScalarType dtype) {
    return subject<ConvolutionModel>(
        std::make_shared<ConvolutionModel>(),
        [dtype](ConvolutionModel& m, int rank, int64_t micro) {
          const auto features =
              torch::relu(m.norm(m.conv(values({3, 3, 6, 6}, rank, micro).to(dtype))));
          return m.head(features.flatten(1)).to(at::kFloat).pow(2).mean();
        });
  };
  const auto mixture = [](at::ScalarType dtype) {
    return subject<MixtureModel>(
        std::make_shared<MixtureModel>(), [dtype](MixtureModel& m, int rank, int64_t micro) {
          const auto expert =
              static_cast<size_t>((3 * rank + micro) % 4);  // the fifth is never used
          const auto x = torch::tanh(m.in(values({6, 9}, rank, micro).to(dtype)));
          return (m.out(torch::tanh(m.experts[expert](x))).to(at::kFloat) - 0.5).pow(2).mean();
        });
  };
  const auto tied = [](at::ScalarType dtype) {
    return subject<TiedModel>(std::make_shared<TiedModel>(),
                              [dtype](TiedModel& m, int rank, int64_t micro) {
                                auto x = values({4, 11}, rank, micro).to(dtype);
                                for (int i = 0; i < 3; ++i)
                                  x = torch::tanh(i % 2 == 0 ? m.layer(x) : m.again(x));
                                return m.head(x).to(at::kFloat).pow(2).mean();
                              });
  };
  const auto script = [](at::ScalarType dtype) -> Subject {
    auto m = std::make_shared<torch::jit::Module>("m");
    m->register_parameter("w", torch::randn({13, 13}).mul(0.2).requires_grad_(), false);
    m->register_parameter("b", torch::zeros({13}).requires_grad_(), false);
    m->define(
        "def forward(self, x):\n    y = torch.addmm(self.b, x, self.w)\n    for i in range(3):\n   "
        "     y = torch.tanh(y @ self.w) + y\n    return y\n");
    return {named_tensors(*m),
            [m, dtype](int rank, int64_t micro) {
              return m->forward({values({4, 13}, rank, micro).to(dtype)})
                  .toTensor()
                  .to(at::kFloat)
                  .pow(2)
                  .mean();
            },
            m};
  };
  return {{"llama", llama},
          {"lstm", lstm},
          {"convolution with batch norm", convolution},
          {"mixture of experts", mixture},
          {"tied layers", tied},
          {"TorchScript", script}};
}

}  // namespace zero::parity
