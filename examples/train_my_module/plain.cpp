// Trains a small network by the plain ZeRO, which is for reading: zero/engine/plain.h. Stages 0
// and 1 print the same losses, and so do 2 and 3: they add the micro-batches in another order.
//   zero launch -n 2 --logs rank0 -- build/plain_zero [STAGE]
#include <torch/torch.h>
#include <zero/base/error.h>
#include <zero/engine/plain.h>

#include <cstdio>
#include <string>
#include <vector>

int main(int argc, char** argv) try {
  auto group = zero::init();
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(1, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 1));
  zero::PlainZero zero(
      zero::named_tensors(model), zero::AdamW{.lr = 1e-2},
      {.stage = argc > 1 ? std::stoi(argv[1]) : 3, .micro_batches = 2, .gradient_clipping = 1.0},
      group);
  torch::manual_seed(100 + group->rank());  // each rank draws its own batches

  for (int step = 1; step <= 200; ++step) {
    double loss_of_step = 0;
    auto micro_batch = [&] {
      auto x = torch::rand({32, 1}) * 6 - 3;
      auto loss = (model->forward(x) - x.sin()).pow(2).mean();
      loss.backward();
      loss_of_step += loss.item<double>() / 2;
    };
    auto result = zero.step({micro_batch, micro_batch});
    if (group->rank() == 0 && step % 50 == 0) {
      std::printf("step %d loss %.9g gradient norm %.9g\n", step, loss_of_step, result.grad_norm);
    }
  }
} catch (const zero::Error& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
