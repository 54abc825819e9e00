#include "zero/comm/backend_rail.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <mutex>
#include <utility>
#include <vector>

namespace zero::comm {
namespace {

class WorkPiece final : public Piece {
 public:
  explicit WorkPiece(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  void abort() override {
    try {
      work_->abort();
    } catch (const std::exception&) {  // the backend's works have no abort: see backend_rail
    }
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

// Wraps a piece of memory as c10d takes it.
std::vector<at::Tensor> tensors_of(std::byte* bytes, size_t size) {
  return {at::from_blob(bytes, {static_cast<int64_t>(size)}, at::kByte)};
}

class BackendCarrier final : public Carrier {
 public:
  explicit BackendCarrier(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {}
  std::unique_ptr<Piece> send(int host, Channel channel, int tag,
                              std::span<const std::byte> bytes) override {
    const std::lock_guard lock(mutex_);
    return send_piece(*backend_, host, of(channel, tag), bytes);
  }
  std::unique_ptr<Piece> receive(int host, Channel channel, int tag,
                                 std::span<std::byte> bytes) override {
    const std::lock_guard lock(mutex_);
    return receive_piece(*backend_, host, of(channel, tag), bytes);
  }
  void close() override {
    try {
      backend_->abort();
    } catch (const std::exception&) {  // the backend has no abort
    }
  }
  std::string describe() const override {
    return fmt::format("{}, a backend of the program's", backend_->getBackendName());
  }

 private:
  // Channels share the backend's connections, so their pieces must differ.
  int of(Channel channel, int tag) const { return static_cast<int>(channel) << tag_bits() | tag; }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;  // c10d does not promise that several threads may call it
};

}  // namespace

std::unique_ptr<Piece> send_piece(c10d::Backend& backend, int rank, int tag,
                                  std::span<const std::byte> bytes) {
  // c10d only reads them
  auto tensors = tensors_of(const_cast<std::byte*>(bytes.data()), bytes.size());
  return std::make_unique<WorkPiece>(backend.send(tensors, rank, tag));
}

std::unique_ptr<Piece> receive_piece(c10d::Backend& backend, int rank, int tag,
                                     std::span<std::byte> bytes) {
  auto tensors = tensors_of(bytes.data(), bytes.size());
  return std::make_unique<WorkPiece>(backend.recv(tensors, rank, tag));
}

std::unique_ptr<Rail> backend_rail(c10::intrusive_ptr<c10d::Backend> backend,
                                   PieceOptions options) {
  const int host = backend->getRank(), hosts = backend->getSize();
  return piece_rail(std::make_unique<BackendCarrier>(std::move(backend)), host, hosts, options);
}

}  // namespace zero::comm
