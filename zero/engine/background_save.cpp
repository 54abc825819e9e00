#include "zero/engine/background_save.h"

#include <ATen/ceil_div.h>
#include <c10/core/GradMode.h>

#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/base/host_memory.h"
#include "zero/checkpoint/file.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

// The bytes that a copy takes in the memory of copies: it begins on a cache line.
int64_t aligned(int64_t bytes) { return at::round_up<int64_t>(bytes, 64); }

int64_t bytes_of(const SliceFile& file, const std::vector<size_t>& pieces) {
  int64_t bytes = 0;
  for (const size_t i : pieces) bytes += aligned(file.pieces()[i].bytes);
  return bytes;
}

at::Tensor copies_memory(int64_t bytes, const std::shared_ptr<Ledger>& ledger) {
  return host_zeros(bytes, at::kByte, ledger, Category::host_buffers);
}

}  // namespace

void SaveMemory::prepare(int64_t bytes) {
  const auto& memory = get(bytes);
  touching_ = std::thread([data = memory.mutable_data_ptr<uint8_t>(), bytes] {
    std::memset(data, 0, static_cast<size_t>(bytes));
  });
}

const at::Tensor& SaveMemory::get(int64_t bytes) {
  wait();
  if (!memory_.defined() || memory_.numel() < bytes) {
    memory_.reset();
    memory_ = copies_memory(bytes, ledger_);
  }
  return memory_;
}

void SaveMemory::wait() {
  if (touching_.joinable()) touching_.join();
}

int64_t SaveSnapshot::bytes_at_once(const SliceFile& file) {
  int64_t bytes = 0;
  for (const auto& piece : file.pieces()) {
    if (piece.exposed) bytes += aligned(piece.bytes);
  }
  return bytes;
}

SaveSnapshot::SaveSnapshot(std::unique_ptr<SliceFile> file, std::optional<int64_t> staging_bytes,
                           SaveMemory& memory)
    : file_(std::move(file)),
      ledger_(memory.ledger()),
      staging_bytes_(staging_bytes.value_or(0)),
      slices_(file_->pieces().size()) {
  std::vector<size_t> at_once;
  for (size_t i = 0; i < slices_.size(); ++i) {
    const auto& piece = file_->pieces()[i];
    if (piece.exposed) {
      at_once.push_back(i);
      continue;
    }
    const auto u = static_cast<size_t>(piece.unit);
    if (u >= of_unit_.size()) of_unit_.resize(u + 1);
    of_unit_[u].push_back(i);
  }
  if (!staging_bytes) return;
  copy_aside(at_once, memory.get(bytes_at_once(*file_)), nullptr);
}

// The copies lie side by side in `memory`.
void SaveSnapshot::copy_aside(const std::vector<size_t>& pieces, const at::Tensor& memory,
                              const std::shared_ptr<int64_t>& block) {
  std::vector<Slice> copies;
  int64_t offset = 0;
  for (const size_t i : pieces) {
    const auto& piece = file_->pieces()[i];
    const auto values = file_->values(piece);
    const auto copy =
        memory.narrow(0, offset, piece.bytes).view(values.scalar_type()).view(values.sizes());
    copy.copy_(values);
    copies.push_back({.place = Place::aside, .copy = copy, .block = block});
    offset += aligned(piece.bytes);
  }
  for (size_t k = 0; k < pieces.size(); ++k) slices_[pieces[k]] = std::move(copies[k]);
}

// Returns false if the staging memory or the system's does not suffice: the update then waits for
// the file.
bool SaveSnapshot::try_copy_aside(const std::vector<size_t>& pieces) {
  const int64_t bytes = bytes_of(*file_, pieces);
  if (staged_ + bytes > staging_bytes_) return false;
  try {
    // This memory is freed with the last of its copies.
    copy_aside(pieces, copies_memory(bytes, ledger_), std::make_shared<int64_t>(bytes));
    staged_ += bytes;
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void SaveSnapshot::before_change(int64_t unit) {
  const auto u = static_cast<size_t>(unit);
  if (u >= of_unit_.size()) return;
  const HostScope not_refused;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    std::vector<size_t> left;
    bool in_use = false;
    for (const size_t i : of_unit_[u]) {
      if (slices_[i].place == Place::table) left.push_back(i);
      in_use = in_use || slices_[i].place == Place::in_use;
    }
    if (given_up_) return true;
    return (left.empty() || try_copy_aside(left)) && !in_use;
  });
}

at::Tensor SaveSnapshot::take(size_t piece) {
  const std::lock_guard lock(mutex_);
  if (given_up_) throw CheckpointError("The save was given up before it was complete.");
  auto& slice = slices_[piece];
  if (slice.place == Place::aside) return slice.copy;
  slice.place = Place::in_use;
  return {};
}

void SaveSnapshot::release(size_t piece) {
  {
    const std::lock_guard lock(mutex_);
    auto& slice = slices_[piece];
    if (slice.block.use_count() == 1) staged_ -= *slice.block;  // the last copy of its block
    slice = {.place = Place::gone};
  }
  changed_.notify_all();
}

Manifest::File SaveSnapshot::write() {
  for (size_t i = 0; i < slices_.size(); ++i) {
    const auto& piece = file_->pieces()[i];
    auto values = take(i);  // undefined: the table still has them
    if (!values.defined()) values = file_->values(piece);
    file_->write(piece, values);
    values.reset();
    release(i);
  }
  return file_->commit();
}

void SaveSnapshot::give_up() {
  {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
    for (auto& slice : slices_) {
      if (slice.place == Place::aside) slice = {.place = Place::gone};
    }
  }
  changed_.notify_all();
}

namespace {

// The entry of a rank's file in the manifest, on its way to rank 0.
fs::path entry_path(const fs::path& file) {
  auto path = file;
  path += ".entry";
  return path;
}

}  // namespace

BackgroundSave::BackgroundSave(std::shared_ptr<SaveSnapshot> snapshot, fs::path partial,
                               Attached attached, std::unique_ptr<Folder> folder,
                               std::optional<HostFolders> on_each_host)
    : snapshot_(std::move(snapshot)),
      partial_(std::move(partial)),
      folder_(std::move(folder)),
      on_each_host_(std::move(on_each_host)) {
  thread_ = std::thread([this, attached = std::move(attached)]() mutable {
    std::exception_ptr failure;
    try {
      const c10::NoGradGuard no_grad;
      const HostScope not_refused;
      as_checkpoint_error([&] { run(std::move(attached)); });
    } catch (...) {
      failure = std::current_exception();
      snapshot_->give_up();
    }
    if (failure || !on_each_host_) folder_.reset();  // removes what is incomplete
    {
      const std::lock_guard lock(mutex_);
      failure_ = failure;
      progress_ = failure ? SaveProgress::failed : SaveProgress::written;
    }
    changed_.notify_all();
  });
}

BackgroundSave::~BackgroundSave() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  snapshot_->give_up();
  thread_.join();
}

void BackgroundSave::run(Attached attached) {
  auto entry = snapshot_->write();
  entry.attached = std::move(attached);
  if (on_each_host_) {
    if (on_each_host_->written) on_each_host_->written(partial_ / entry.name);
    entry_ = to_text(entry);
  } else if (folder_) {
    folder_->manifest.files.push_back(std::move(entry));
  } else {
    write_file(entry_path(partial_ / entry.name), to_text(entry), fail<CheckpointError>);
  }
  {
    const std::lock_guard lock(mutex_);
    has_file_ = true;
  }
  changed_.notify_all();
  if (folder_ && !on_each_host_) complete(*folder_);
}

void BackgroundSave::complete(Folder& folder) {
  for (int rank = 1; rank < folder.ranks; ++rank)
    folder.manifest.files.push_back(entry_of(shard_name(rank, folder.ranks)));
  write_manifest(partial_, folder.manifest);
  folder.folder.commit();
}

void BackgroundSave::complete(const std::vector<std::string>& entries) {
  if (folder_ == nullptr) return;
  for (const auto& entry : entries) folder_->manifest.files.push_back(file_from_text(entry));
  write_manifest(partial_, folder_->manifest);
  folder_->folder.commit();
}

// Waits for the entry of a file, and removes it.
Manifest::File BackgroundSave::entry_of(const fs::path& name) {
  const auto path = entry_path(partial_ / name);
  std::error_code error;
  std::unique_lock lock(mutex_);
  while (!fs::exists(path, error)) {
    changed_.wait_for(lock, std::chrono::milliseconds(20));
    if (stopped_)
      throw CheckpointError("The save was given up: another rank has not saved its part.");
  }
  const auto entry = file_from_text(read_file(path, &fail<CheckpointError>));
  fs::remove(path, error);  // no part of the checkpoint, so one that stays does no harm
  return entry;
}

void BackgroundSave::wait_for_file() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return has_file_ || progress_ != SaveProgress::under_way; });
  if (failure_) std::rethrow_exception(failure_);
}

void BackgroundSave::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return progress_ != SaveProgress::under_way; });
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace zero
