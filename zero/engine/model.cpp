#include "zero/engine/model.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "zero/base/error.h"
#include "zero/base/gradient_place.h"
#include "zero/base/hash.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/gather_records.h"
#include "zero/device/stream.h"
#include "zero/engine/flat.h"
#include "zero/engine/trained_dtype.h"
#include "zero/optim/sweeps.h"
#include "zero/paging/page.h"

namespace zero {

using torch::autograd::PostAccumulateGradHook;

namespace {

bool dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Returns the address, also if the bytes are absent: then nobody may read it.
const void* data_of(const at::Tensor& tensor) {
  return storage_of(tensor)->_mutable_data_ptr_no_checks().get();
}

bool same_elements(const at::Tensor& a, const at::Tensor& b) {
  return storage_of(a) == storage_of(b) && a.storage_offset() == b.storage_offset() &&
         a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

// Returns whether two tensors of one storage have an element in common.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (storage_of(a) != storage_of(b) || a.numel() == 0 || b.numel() == 0) return false;
  const auto extent = [](const at::Tensor& tensor) {
    int64_t last = tensor.storage_offset();
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const int64_t bytes = tensor.element_size();
    return std::pair(tensor.storage_offset() * bytes, (last + 1) * bytes);
  };
  const auto [a_begin, a_end] = extent(a);
  const auto [b_begin, b_end] = extent(b);
  if (a_end <= b_begin || b_end <= a_begin) return false;
  if (dense(a) && dense(b)) return true;
  // Extents may cross although the tensors are apart: columns of one matrix, for example.
  if (a.element_size() != b.element_size()) return true;
  const auto mark = at::zeros({std::max(a_end, b_end) / a.element_size()}, at::kByte);
  const auto marks_of = [&](const at::Tensor& tensor) {
    return mark.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  };
  marks_of(a).fill_(1);
  return marks_of(b).any().item<bool>();
}

// Returns the name of the module with the dot behind it.
std::string module_of(const std::string& name) { return name.substr(0, name.rfind('.') + 1); }

std::unique_ptr<PostAccumulateGradHook>& hook_of(const at::Tensor& parameter) {
  // A tensor that has never required a gradient has nothing of autograd yet.
  torch::autograd::impl::materialize_autograd_meta(parameter);
  return torch::autograd::impl::post_acc_grad_hooks(parameter);
}

}  // namespace

// A tensor has one slot for hooks. If a hook of the user is there already, this one calls it first.
// Frozen parameters have one too, which tells the engine that they belong to.
class Model::Hook final : public PostAccumulateGradHook, public GradientPlace {
 public:
  Hook(Model& model, int64_t parameter, std::unique_ptr<PostAccumulateGradHook> users)
      : users(std::move(users)), model(model), parameter_(parameter) {}
  ~Hook() override { *there_ = false; }
  void operator()(const torch::autograd::Variable& variable) override {
    if (users) {
      const auto there = there_;
      (*users)(variable);
      if (!*there) return;  // the user's hook has ended the engine, and this with it
    }
    if (model.sink_ != nullptr && model.trainable(parameter_))
      model.sink_->arrive(parameter_, variable);
  }
  /// Compiled autograd traces the whole pass before any of it runs.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    try {
      throw Error(fmt::format(
          "Compiled autograd cannot run a backward pass that reaches parameter '{}': its "
          "gradient is reduced while the pass runs. Leave it off "
          "(torch._dynamo.config.compiled_autograd, torch._dynamo.compiled_autograd); "
          "torch.compile by itself works.",
          model.name(parameter_)));
    } catch (...) {
      if (model.rethrow()) model.rethrow()();
      throw;
    }
  }
  at::Tensor place() override {
    return model.sink_ != nullptr && model.trainable(parameter_) ? model.sink_->place(parameter_)
                                                                 : at::Tensor();
  }
  bool shows_gradient() const override { return users != nullptr; }
  double loss_factor() const override {
    return model.sink_ != nullptr ? model.sink_->loss_factor() : 1;
  }
  bool announce_rows(const at::Tensor& indices) override {
    return model.sink_ != nullptr && model.trainable(parameter_) &&
           model.sink_->announce_rows(parameter_, indices);
  }
  c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(const at::Tensor& indices) override {
    if (model.sink_ == nullptr || !model.trainable(parameter_)) return {};
    return model.sink_->announce_look_up(parameter_, indices);
  }
  GradientTaker* taker() override {
    return model.sink_ != nullptr && model.trainable(parameter_) ? model.sink_->taker(parameter_)
                                                                 : nullptr;
  }
  void returns_whole(const at::Tensor& gradient) override {
    if (model.sink_ != nullptr && model.trainable(parameter_))
      model.sink_->returns_whole(parameter_, gradient);
  }
  /// Returns the hook of `tensor`, if there is one.
  static Hook* of(const at::Tensor& tensor) { return dynamic_cast<Hook*>(hook_of(tensor).get()); }

  std::unique_ptr<PostAccumulateGradHook> users;
  Model& model;

 private:
  int64_t parameter_;
  std::shared_ptr<bool> there_ = std::make_shared<bool>(true);
};

void check_trained_dtype(const std::string& parameter, c10::ScalarType dtype) {
  const bool packed = dtype == at::kByte;  // which cannot require a gradient
  if (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || packed) return;
  throw ConfigError(
      fmt::format("Parameter '{}' has dtype {}; the engine trains Float, BFloat16 and Half, "
                  "and keeps Byte (packed weights). Convert it, or register it as a buffer.",
                  parameter, c10::toString(dtype)));
}

Model::Model(NamedTensors tensors, const std::vector<ParameterGroup>& groups)
    : list_again_(std::move(tensors.again)), rethrow_(std::move(tensors.rethrow)) {
  take_names(tensors);
  assign_groups(groups);
}

Model::~Model() { leave(); }

void Model::take_names(const NamedTensors& tensors) {
  std::vector<Shown> tied;
  std::unordered_map<const c10::TensorImpl*, int64_t> known;
  std::unordered_map<const c10::StorageImpl*, std::vector<int64_t>> of_storage;
  for (const auto& [name, tensor] : tensors.parameters) {
    if (!tensor.defined()) continue;
    if (const auto found = known.find(tensor.unsafeGetTensorImpl()); found != known.end()) {
      index_[name] = found->second;
      continue;
    }
    if (tensor.is_meta()) {
      throw ConfigError(
          fmt::format("Parameter '{}' is on the device meta, where there are no values. Move the "
                      "module to the CPU before constructing the Engine.",
                      name));
    }
    if (tensor.is_inference()) {
      throw ConfigError(
          fmt::format("Parameter '{}' was made under c10::InferenceMode, which keeps no version of "
                      "it. Build the module outside of that mode.",
                      name));
    }
    if (!parameters_.empty() && tensor.device() != device()) {
      throw ConfigError(
          fmt::format("Parameter '{}' is on {}, but '{}' is on {}. Move the module to one device "
                      "before constructing the Engine.",
                      name, tensor.device().str(), names_.front(), device().str()));
    }
    check_trained_dtype(name, tensor.scalar_type());
    check_owner(name, tensor);
    const bool absent = tensor.numel() > 0 && data_of(tensor) == nullptr;
    awaits_values_ = awaits_values_ || absent;
    if (absent && !tensors.values_follow) {
      throw ConfigError(
          fmt::format("Parameter '{}' has no values: its bytes went with an Engine that sharded it "
                      "(ZeRO stage 3) and no longer exists. Build the module anew, or give each "
                      "parameter memory again (set_data), construct the Engine, and load what "
                      "Engine::save or Engine::save_full of the former one wrote.",
                      name));
    }
    Shown shown{.tensor = tensor, .name = name, .parameter = size()};
    auto& neighbours = of_storage[storage_of(tensor)];
    if (const auto other = tied_to(shown, neighbours)) {
      if (parameter(*other).requires_grad() != tensor.requires_grad()) {
        throw ConfigError(
            fmt::format("Parameters '{}' and '{}' share their memory, so they are one, but one is "
                        "frozen and the other is not. Freeze both, or give one a copy.",
                        this->name(*other), name));
      }
      shown.parameter = known[tensor.unsafeGetTensorImpl()] = index_[name] = *other;
      tied.push_back(std::move(shown));
      continue;
    }
    index_[name] = known[tensor.unsafeGetTensorImpl()] = shown.parameter;
    neighbours.push_back(shown.parameter);
    names_.push_back(name);
    parameters_.push_back(tensor);
    trainable_.push_back(tensor.requires_grad());
    shown_.push_back(std::move(shown));
  }
  shown_.insert(shown_.end(), tied.begin(), tied.end());
  if (parameters_.empty())
    throw ConfigError("The model has no parameters: there is nothing to train.");
  for (const auto& [name, buffer] : tensors.buffers) {
    if (!buffer.defined()) continue;
    buffers_.emplace_back(name, buffer);
    const auto module = module_of(name);
    if (buffer.scalar_type() == at::kFloat &&
        (name == module + "running_mean" || name == module + "running_var"))
      fp32_modules_.insert(module);
  }
  for (const auto& name : names_) stays_fp32_.push_back(fp32_modules_.contains(module_of(name)));
  check_whole_take_over();
}

void Model::keep_fp32(const std::string& patterns) {
  std::istringstream list(patterns);
  for (std::string pattern; std::getline(list, pattern, ',');) {
    std::erase(pattern, ' ');
    if (pattern.empty()) continue;
    bool any = false;
    const auto matches = [&](const std::string& name) {
      for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
        if (fnmatch(pattern.c_str(), name.substr(0, dot).c_str(), 0) == 0) return true;
      }
      return false;
    };
    for (size_t i = 0; i < names_.size(); ++i) {
      if (!matches(names_[i])) continue;
      any = stays_fp32_[i] = true;
      fp32_modules_.insert(module_of(names_[i]));
    }
    for (const auto& [name, buffer] : buffers_) {
      if (!matches(name)) continue;
      any = true;
      fp32_modules_.insert(module_of(name));
    }
    if (any) continue;
    throw ConfigError(fmt::format(
        "fp32_modules has '{}', and no module of that name has parameters or buffers. Patterns are "
        "of whole names, as \"layers.0.norm\" or \"*.norm\".",
        pattern));
  }
}

// Throws ConfigError if another engine would lose only a part of its model, since it could not go
// on.
void Model::check_whole_take_over() const {
  std::set<const c10::TensorImpl*> mine;
  for (const auto& shown : shown_) mine.insert(shown.tensor.unsafeGetTensorImpl());
  std::set<const Model*> known;
  for (const auto& shown : shown_) {
    const auto* hook = Hook::of(shown.tensor);
    if (hook == nullptr || !known.insert(&hook->model).second) continue;
    for (const auto& others : hook->model.shown_) {
      if (mine.contains(others.tensor.unsafeGetTensorImpl())) continue;
      throw ConfigError(fmt::format(
          "Parameter '{}' belongs to another Engine that still lives, and so does its '{}', which "
          "this model does not have: each Engine trains parameters of its own. Give one Engine a "
          "module that holds both models (with parameter groups for their optimizers), or end the "
          "other Engine first.",
          shown.name, others.name));
    }
  }
}

// Throws ConfigError if another live engine has the parameter and cannot give it up.
void Model::check_owner(const std::string& name, const at::Tensor& tensor) {
  const auto* hook = Hook::of(tensor);
  if (paging::page_of(tensor) == nullptr && (hook == nullptr || hook->model.release_)) return;
  throw ConfigError(fmt::format(
      "Parameter '{}' belongs to an Engine that still lives and shards it (ZeRO stage 3), or whose "
      "zero::Gathered scope is still open: it cannot be taken over. Close the scope; at stage 3 "
      "save the states (Engine::save_full), end that Engine, build the module anew, construct the "
      "Engine, and load them.",
      name));
}

// Returns the parameter among `neighbours` (those in the same storage) that shows the same
// elements.
std::optional<int64_t> Model::tied_to(const Shown& shown,
                                      const std::vector<int64_t>& neighbours) const {
  for (const int64_t i : neighbours) {
    if (shown.tensor.numel() > 0 && same_elements(parameter(i), shown.tensor)) return i;
    if (!overlap(parameter(i), shown.tensor)) continue;
    throw ConfigError(fmt::format(
        "Parameters '{}' ({}) and '{}' ({}) overlap in memory without being the same elements: "
        "an update of one would change the other. Give one a copy (set_data(p.clone())), or use "
        "one parameter and views of it.",
        name(i), fmt::join(parameter(i).sizes(), ", "), shown.name,
        fmt::join(shown.tensor.sizes(), ", ")));
  }
  return std::nullopt;
}

void Model::assign_groups(const std::vector<ParameterGroup>& groups) {
  constexpr size_t kNone = static_cast<size_t>(-1);
  parameter_group_of_.assign(parameters_.size(), kNone);
  size_t rest = kNone;
  if (groups.empty())
    throw ConfigError("The Engine was given no parameter group: pass one, or an optimizer.");
  for (size_t g = 0; g < groups.size(); ++g) {
    optim::check(groups[g].optimizer);
    optimizers_.push_back(groups[g].optimizer);
    if (groups[g].rest) {
      if (rest != kNone)
        throw ConfigError(fmt::format(
            "Parameter groups {} and {} both take the rest (ParameterGroup::rest); only one may.",
            rest, g));
      rest = g;
    }
    for (const auto& name : groups[g].names) {
      auto& chosen = parameter_group_of_[static_cast<size_t>(index_of(name))];
      if (chosen != kNone)
        throw ConfigError(fmt::format("Parameter '{}' is in groups {} and {}.", name, chosen, g));
      chosen = g;
    }
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const bool named = parameter_group_of_[p] != kNone;
    for (size_t g = 0; g < groups.size() && !named; ++g) {
      if (!groups[g].matches || !groups[g].matches(names_[p], parameters_[p])) continue;
      if (parameter_group_of_[p] != kNone) {
        throw ConfigError(fmt::format("Parameter '{}' matches groups {} and {}.", names_[p],
                                      parameter_group_of_[p], g));
      }
      parameter_group_of_[p] = g;
    }
    if (parameter_group_of_[p] != kNone) continue;
    if (rest == kNone && trainable_[p]) {
      throw ConfigError(
          fmt::format("Parameter '{}' is in no parameter group. Name it in one, add one that takes "
                      "the rest (ParameterGroup::rest), or freeze it.",
                      names_[p]));
    }
    parameter_group_of_[p] = rest == kNone ? 0 : rest;
  }
  part_from_matrices();
}

// Gives the parameters that a group's optimizer does not train itself (Muon, Apollo) a group of
// their own, with the group's AdamW.
void Model::part_from_matrices() {
  const size_t given = optimizers_.size();
  beside_.resize(given);
  for (size_t g = 0; g < given; ++g) {
    const auto beside = optim::beside_matrices(optimizers_[g]);
    if (!beside) continue;
    const size_t others = optimizers_.size();
    for (size_t p = 0; p < parameters_.size(); ++p) {
      if (parameter_group_of_[p] == g && !optim::is_hidden_matrix(names_[p], parameters_[p].dim()))
        parameter_group_of_[p] = others;
    }
    if (std::find(parameter_group_of_.begin(), parameter_group_of_.end(), others) !=
        parameter_group_of_.end()) {
      beside_[g] = others;
      optimizers_.emplace_back(*beside);
    }
  }
}

std::optional<int64_t> Model::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? std::nullopt : std::optional(found->second);
}

int64_t Model::index_of(std::string_view name) const {
  if (const auto found = find(std::string(name))) return *found;
  std::vector<std::string> known;
  for (const auto& entry : index_) known.push_back(entry.first);
  throw ConfigError(
      fmt::format("The model has no parameter '{}'.{}", name, did_you_mean(name, known)));
}

std::vector<std::string> Model::names_of(int64_t index) const {
  std::vector<std::string> names{name(index)};
  for (const auto& [other, of] : index_) {
    if (of == index && other != names.front()) names.push_back(other);
  }
  std::sort(names.begin() + 1, names.end());
  return names;
}

std::optional<int64_t> Model::find(const at::Tensor& tensor) const {
  const auto found = std::find_if(shown_.begin(), shown_.end(),
                                  [&](const Shown& shown) { return shown.tensor.is_same(tensor); });
  if (found == shown_.end()) return std::nullopt;
  return found->parameter;
}

ParameterShape Model::shape_of(int64_t index) const {
  const auto& tensor = parameter(index);
  return {.name = name(index),
          .sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .dtype = tensor.scalar_type(),
          .trainable = trainable(index),
          .stays_fp32 = stays_fp32(index),
          .optimizer = optimizer_of(index)};
}

ModelShape Model::shape() const {
  ModelShape shape{.parameters = {}, .own_memory = is_asynchronous(device())};
  for (int64_t i = 0; i < size(); ++i) shape.parameters.push_back(shape_of(i));
  return shape;
}

void Model::agree(const Config& config, comm::Group& group) const {
  std::vector<std::string> lines{config.dump()};
  for (const auto& each : optimizers_) lines.push_back(dump(each));
  for (int64_t i = 0; i < size(); ++i) {
    const auto& each = parameter(i);
    lines.push_back(fmt::format(
        "{} {} ({}) {}{} group {}", name(i), c10::toString(each.scalar_type()),
        fmt::join(each.sizes(), ", "), trainable(i) ? "trainable" : "frozen",
        is_absent(i) ? " without values" : "", parameter_group_of_[static_cast<size_t>(i)]));
  }
  for (const auto& [name, buffer] : buffers_) {
    lines.push_back(fmt::format("buffer {} {} ({})", name, c10::toString(buffer.scalar_type()),
                                fmt::join(buffer.sizes(), ", ")));
  }
  struct Given {
    uint64_t hash = 0;
    int64_t parameters = 0;
  };
  Hash hash;
  for (const auto& line : lines) hash.add(line);
  const auto all = comm::gather_records(group, Given{hash.value(), size()}, "the model's plan");
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].hash == all[0].hash) continue;
    throw ConfigError(fmt::format(
        "Rank {} was given another model or configuration than rank 0 ({} parameters there, {} on "
        "rank 0; this is rank {} with {}). Names, shapes, dtypes, order, frozen parameters, "
        "buffers, optimizers and the configuration must be the same on all ranks.",
        rank, all[rank].parameters, all[0].parameters, group.rank(), size()));
  }
}

void Model::take_over() {
  std::set<Model*> others;
  for (const auto& shown : shown_) {
    if (auto* hook = Hook::of(shown.tensor)) others.insert(&hook->model);
  }
  while (!others.empty()) {
    const auto release = (*others.begin())->release_;  // a copy, since calling it ends its owner
    others.erase(others.begin());
    release();
  }
}

void Model::make_dense() const {
  for (const auto& tensor : parameters_) {
    if (!dense(tensor)) tensor.set_data(tensor.detach().contiguous().clone());
  }
}

bool Model::is_absent(int64_t index) const {
  return parameter(index).numel() > 0 && data_of(parameter(index)) == nullptr;
}

void Model::give_storage(int64_t index, at::ScalarType dtype, comm::Group& group) const {
  const auto& tensor = parameter(index);
  if (is_absent(index)) {
    tensor.set_data(at::empty_strided(tensor.sizes(), tensor.strides(),
                                      at::TensorOptions(dtype).device(device())));
    return;
  }
  const bool own = tensor.storage_offset() == 0 && tensor.storage().nbytes() == tensor.nbytes();
  // The values to be overwritten may lie in a file that is mapped. A write would copy the file's
  // pages, and the copies would stay until the last parameter of the file is taken.
  const bool replaced = group.rank() != 0;
  if (!own || tensor.device() != device()) {
    const auto before = tensor.detach();
    tensor.set_data(replaced ? at::empty_strided(tensor.sizes(), tensor.strides(),
                                                 tensor.options().device(device()))
                             : before.to(tensor.options().device(device()), false, true,
                                         at::MemoryFormat::Preserve));
    if (before.device().is_cpu() && !replaced)  // throws if it was overrun
      HostAllocator::instance().check(before.storage().unsafeGetStorageImpl()->mutable_data());
  } else if (replaced) {
    auto& storage = *tensor.storage().unsafeGetStorageImpl();
    const c10::OptionalDeviceGuard on(tensor.device());
    auto& allocator = *c10::GetAllocator(tensor.device().type());
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));  // frees before it
                                                                          // allocates
    storage.set_data_ptr_noswap(allocator.allocate(tensor.nbytes()));
  }
  if (group.size() > 1) group.broadcast(flat_view(tensor), 0, name(index)).wait();
}

namespace {

at::Tensor plain(const at::Tensor& buffer) {
  const auto values = buffer.detach();
  return values.is_complex() ? at::view_as_real(values) : values;
}

}  // namespace

std::vector<Model::Buffer> Model::plain_buffers() const {
  std::vector<Buffer> list;
  for (const auto& [name, buffer] : buffers_) list.emplace_back(name, plain(buffer).contiguous());
  return list;
}

void Model::set_buffer(size_t index, const at::Tensor& values) const {
  auto target = plain(buffers_[index].second);
  auto source = values;
  for (int64_t d = 0; d < target.dim(); ++d) {  // expanded: one element stands for all of a
                                                // dimension
    if (target.stride(d) != 0 || target.size(d) < 2) continue;
    target = target.narrow(d, 0, 1);
    source = source.narrow(d, 0, 1);
  }
  target.copy_(source);
}

void Model::move_buffers(std::optional<at::ScalarType> dtype) const {
  for (const auto& [name, buffer] : buffers_) {
    const bool casts =
        dtype && buffer.is_floating_point() && !fp32_modules_.contains(module_of(name));
    const auto to = casts ? *dtype : buffer.scalar_type();
    if (buffer.device() != device() || buffer.scalar_type() != to)
      buffer.set_data(buffer.detach().to(device(), to));
  }
}

void Model::synchronize_buffers(BufferPolicy policy, comm::Group& group) const {
  if (policy == BufferPolicy::per_rank || group.size() == 1) return;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].second.numel() == 0) continue;
    const auto& name = buffers_[i].first;
    const auto values = plain(buffers_[i].second).contiguous().to(device(), false, /*copy=*/true);
    if (policy == BufferPolicy::average && values.is_floating_point()) {
      group.all_reduce(values.view({-1}), name).wait();
      values.div_(group.size());
    } else {
      group.broadcast(values.view({-1}), 0, name).wait();
    }
    set_buffer(i, values);
  }
}

void Model::tie() const {
  for (const auto& shown : shown_) {
    const auto& first = parameter(shown.parameter);
    if (storage_of(shown.tensor) != storage_of(first)) shown.tensor.set_data(first.detach());
  }
}

void Model::begin_use(bool paged, GradientSink& sink) {
  for (auto& shown : shown_) {
    const auto& tensor = shown.tensor;
    const auto& first = parameter(shown.parameter);
    if (!tensor.is_same(first)) {
      if (paged) paging::tag(tensor);
      if (trainable(shown.parameter)) {
        accumulators_.push_back(torch::autograd::impl::grad_accumulator(first));
        torch::autograd::impl::set_grad_accumulator(tensor, accumulators_.back());
      }
    }
    if (trainable(shown.parameter)) tensor.mutable_grad() = at::Tensor();
    shown.storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    shown.data = paged ? nullptr : data_of(tensor);
    shown.dtype = tensor.scalar_type();
    shown.numel = tensor.numel();
  }
  for (int64_t i = 0; i < size(); ++i) versions_.push_back(version(i));
  paged_ = paged;
  sink_ = &sink;
  hook();
}

void Model::disown() const {
  for (int64_t i = 0; i < size(); ++i) {
    const auto& tensor = parameter(i);
    if (tensor.numel() == 0 || data_of(tensor) != nullptr || paging::page_of(tensor) != nullptr)
      continue;
    paging::orphan(*storage_of(tensor),
                   fmt::format("Parameter '{}' was being sharded (ZeRO stage 3) by an Engine whose "
                               "constructor failed, and its bytes went with it. Build the module "
                               "anew.",
                               name(i)));
  }
}

void Model::hook() {
  for (const auto& shown : shown_) {
    if (Hook::of(shown.tensor) != nullptr) continue;
    auto users = std::move(hook_of(shown.tensor));
    torch::autograd::impl::set_post_acc_grad_hooks(
        shown.tensor, std::make_unique<Hook>(*this, shown.parameter, std::move(users)));
  }
}

void Model::leave() {
  sink_ = nullptr;
  for (const auto& shown : shown_) {
    if (auto* hook = Hook::of(shown.tensor); hook != nullptr && &hook->model == this) {
      auto users = std::move(hook->users);
      torch::autograd::impl::set_post_acc_grad_hooks(shown.tensor, std::move(users));
    }
    if (paged_ && !shown.tensor.is_same(parameter(shown.parameter))) paging::untag(shown.tensor);
  }
  paged_ = false;
}

int64_t Model::version(int64_t index) const {
  int64_t sum = parameter(index)._version();
  for (auto tied = shown_.begin() + size(); tied != shown_.end(); ++tied) {
    if (tied->parameter == index) sum += tied->tensor._version();
  }
  return sum;
}

void Model::check_values(std::string_view what) const {
  if (!awaits_values_) return;
  throw Error(
      fmt::format("{} of a model that was built without values (NamedTensors::values_follow), and "
                  "none were loaded since. Call load_pretrained, Engine::load or Engine::load_full "
                  "before.",
                  what));
}

void Model::check() const {
  if (evaluates_) {
    throw Error(
        "A backward pass or a step while the weights for evaluation are in force "
        "(Engine::optimizer_eval), which are not those that the optimizer trains. Call "
        "Engine::optimizer_train before the pass.");
  }
  check_values("A backward pass or a step");
  for (const auto& shown : shown_) {
    const auto& tensor = shown.tensor;
    if (storage_of(tensor) != shown.storage.unsafeGetStorageImpl() ||
        tensor.scalar_type() != shown.dtype ||
        (shown.data != nullptr && data_of(tensor) != shown.data) || tensor.numel() != shown.numel) {
      throw Error(fmt::format(
          "The storage of parameter '{}' was replaced (set_data, Module::to) after the Engine took "
          "it over, so the Engine would train values that the module no longer uses. Convert the "
          "module before constructing the Engine, and write values inside zero::Gathered or with "
          "Engine::set_parameter; or construct a new Engine.",
          shown.name));
    }
    if (tensor.requires_grad() && !trainable(shown.parameter)) {
      throw Error(fmt::format(
          "Parameter '{}' requires a gradient now, but was frozen when the Engine was constructed, "
          "which has no optimizer states for it. Freeze it again, or construct a new Engine.",
          shown.name));
    }
  }
}

void Model::check_names() const {
  if (!list_again_) return;
  for (const auto& [name, tensor] : list_again_().parameters) {
    if (!tensor.defined()) continue;
    const auto found = index_.find(name);
    if (found == index_.end()) {
      throw Error(fmt::format(
          "Parameter '{}' was registered after the Engine was constructed, which does not train "
          "it. Construct a new Engine.",
          name));
    }
    if (parameter(found->second).is_same(tensor) || find(tensor) == found->second) continue;
    throw Error(
        fmt::format("Parameter '{}' was replaced by another tensor after the Engine was "
                    "constructed, which trains the former. Write values inside zero::Gathered or "
                    "with Engine::set_parameter, or construct a new Engine.",
                    name));
  }
}

}  // namespace zero
