// Trains a module of your own with its parameters, gradients and optimizer states sharded over the
// ranks:
//   zero launch -n 2 --logs rank0 -- build/train_my_module [STAGE]
#include <torch/torch.h>
#include <zero/zero.h>

#include <cstdio>
#include <memory>
#include <numbers>
#include <string>

// Tells two interleaved spirals apart. Knows nothing of libzero.
struct MyNet : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& points) { return layers->forward(points); }
  torch::nn::Sequential layers =
      register_module("layers", torch::nn::Sequential(torch::nn::Linear(2, 64), torch::nn::ReLU(),
                                                      torch::nn::Linear(64, 64), torch::nn::ReLU(),
                                                      torch::nn::Linear(64, 2)));
};

int main(int argc, char** argv) try {
  auto group =
      zero::init();  // from torchrun, mpirun, Slurm or `zero launch`; alone: a group of one
  zero::Config config{.stage = argc > 1 ? std::stoi(argv[1]) : 3, .seed_by_rank = true};
  torch::manual_seed(1);
  auto model = std::make_shared<MyNet>();
  zero::Engine engine(model, zero::AdamW{.lr = 1e-2}, config, group);

  for (int step = 1; step <= 500; ++step) {
    auto label = torch::randint(2, {64});  // each rank draws its own batch
    auto radius = torch::rand({64});
    auto angle = 2 * std::numbers::pi * radius + std::numbers::pi * label;
    auto points = torch::stack({radius * angle.cos(), radius * angle.sin()}, 1);
    auto loss = torch::nn::functional::cross_entropy(model->forward(points), label);
    engine.backward(loss);
    engine.step();
    if (group->rank() == 0 && step % 100 == 0) {
      std::printf("step %d loss %.9g\n", step, loss.item<double>());
    }
  }
  engine.save_full("my_module.safetensors");
} catch (const zero::Error& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
