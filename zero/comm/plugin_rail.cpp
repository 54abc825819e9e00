#include "zero/comm/plugin_rail.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/shared_library.h"
#include "zero/comm/rail_plugin.h"
#include "zero/comm/watched_store.h"

namespace zero::comm {
namespace {

std::string file_name(const std::string& name) { return fmt::format("libzero_rail_{}.so", name); }

const ZeroRailPlugin& load(const std::string& name) {
  const auto file = file_name(name);
  // The library stays, since an MPI's cannot be unloaded. Its symbols are visible to all, because
  // the parts that an MPI loads by itself look for them.
  std::string why;
  void* library = load_beside(file, why);
  if (library == nullptr) {
    throw CommError(fmt::format(
        "The plugin {} cannot be loaded: {}. Build libzero where lib{}-dev is installed, and "
        "install lib{} on every host.",
        file, why, name, name == "openmpi" ? "openmpi3" : "mpich12"));
  }
  using Entry = const ZeroRailPlugin* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "zero_rail_plugin"));
  if (entry == nullptr) throw CommError(fmt::format("{} is no plugin of libzero's.", file));
  const auto* plugin = entry();
  if (plugin->interface != ZERO_RAIL_PLUGIN_INTERFACE) {
    throw CommError(
        fmt::format("The plugin {} has interface {} and this libzero needs {}: build both from the "
                    "same source.",
                    file, plugin->interface, ZERO_RAIL_PLUGIN_INTERFACE));
  }
  return *plugin;
}

// Room for the text that a plugin's function may write.
struct Reason {
  std::array<char, 512> text{};
  std::string str() const { return text.data(); }
};

class PluginPiece final : public Piece {
 public:
  PluginPiece(const ZeroRailPlugin& plugin, void* piece) : plugin_(plugin), piece_(piece) {}
  PluginPiece(const PluginPiece&) = delete;
  PluginPiece& operator=(const PluginPiece&) = delete;
  ~PluginPiece() override { plugin_.release(piece_); }

  bool wait(std::chrono::milliseconds timeout) override {
    Reason reason;
    const int outcome =
        plugin_.wait(piece_, timeout.count(), reason.text.data(), reason.text.size());
    if (outcome < 0) throw std::runtime_error(reason.str());
    return outcome > 0;
  }
  void abort() override { plugin_.abort(piece_); }

 private:
  const ZeroRailPlugin& plugin_;
  void* piece_;
};

class PluginCarrier final : public Carrier {
 public:
  PluginCarrier(const ZeroRailPlugin& plugin, const std::string& name,
                const std::vector<int>& ranks, int host)
      : plugin_(plugin) {
    Reason reason;
    const std::vector<int32_t> joined(ranks.begin(), ranks.end());
    const auto hosts = static_cast<int32_t>(joined.size());
    rail_ = plugin_.open(joined.data(), host, hosts, static_cast<int32_t>(kChannels),
                         reason.text.data(), reason.text.size());
    if (rail_ == nullptr) {
      throw CommError(fmt::format("{} ({}) gives host {} of {} no rail: {}.", file_name(name),
                                  plugin_.library, host, hosts, reason.str()));
    }
  }
  PluginCarrier(const PluginCarrier&) = delete;
  PluginCarrier& operator=(const PluginCarrier&) = delete;
  ~PluginCarrier() override { plugin_.close(rail_); }

  int tag_bits() const override { return std::min(plugin_.tag_bits(rail_), 28); }
  std::unique_ptr<Piece> send(int host, Channel channel, int tag,
                              std::span<const std::byte> bytes) override {
    return post(true, host, channel, tag, const_cast<std::byte*>(bytes.data()), bytes.size());
  }
  std::unique_ptr<Piece> receive(int host, Channel channel, int tag,
                                 std::span<std::byte> bytes) override {
    return post(false, host, channel, tag, bytes.data(), bytes.size());
  }
  void close() override { plugin_.stop(rail_); }
  std::string describe() const override { return plugin_.library; }

 private:
  std::unique_ptr<Piece> post(bool sends, int host, Channel channel, int tag, std::byte* bytes,
                              size_t size) {
    Reason reason;
    void* piece = plugin_.post(rail_, sends ? 1 : 0, host, static_cast<int32_t>(channel), tag,
                               bytes, size, reason.text.data(), reason.text.size());
    if (piece == nullptr) throw std::runtime_error(reason.str());
    return std::make_unique<PluginPiece>(plugin_, piece);
  }

  const ZeroRailPlugin& plugin_;
  void* rail_ = nullptr;
};

}  // namespace

std::unique_ptr<Rail> plugin_rail(const std::string& name, const std::vector<int>& ranks, int host,
                                  PieceOptions options, const std::function<void()>& check) {
  const auto& plugin = load(name);
  auto carrier =
      answer_to([&plugin, name, ranks,
                 host] { return std::make_unique<PluginCarrier>(plugin, name, ranks, host); },
                check);
  return piece_rail(std::move(carrier), host, static_cast<int>(ranks.size()), options);
}

}  // namespace zero::comm
