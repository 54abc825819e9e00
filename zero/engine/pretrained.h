// Weights of other programs: Hugging Face's folders, read straight into an engine's shards and
// written from them.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "zero/checkpoint/tensor_place.h"
#include "zero/engine/engine.h"
#include "zero/optim/base_format.h"

namespace zero {

struct PretrainedOptions {
  /// By the names of parameters: where their values lie in the files. A parameter that is absent
  /// here has a tensor of its own name and shape.
  std::map<std::string, TensorPlace> places{};
  /// Names in files, and the parameters that the model has in their place, because it ties them. A
  /// file may have both, which then have the same values.
  std::map<std::string, std::string> tied{};
  /// By the names of parameters that keep the bytes of a matrix (optim/base_format.h): its format
  /// and sizes. The files have it in floating point, in the order of its storage (`places` does not
  /// have it).
  std::map<std::string, PackedMatrix> packed{};
  /// Parameters that the files do not have keep their values.
  bool allow_missing = false;
  /// Parameters that the program has added to the model and given values (LoRA's, a new head's):
  /// the files need not have them, and then they keep those.
  std::set<std::string> added{};
};

/// The names that did not go together.
struct PretrainedReport {
  std::vector<std::string> missing;    ///< parameters that the files do not have
  std::vector<std::string> kept;       ///< PretrainedOptions::added that the files do not have
  std::vector<std::string> left_over;  ///< tensors that no parameter or buffer took
  /// Buffers that the files do not have, such as a mean that batch normalisation keeps: they keep
  /// the values of the module.
  std::vector<std::string> kept_buffers;
};

/// Begins anew from the weights at `path`, a safetensors file or a folder: `model.safetensors`, or
/// several files and `model.safetensors.index.json`. Each rank reads the ranges of its own slices,
/// in pieces of 16 MiB, in any floating-point dtype: parameters are rounded to the engine's, and
/// master weights keep what the file has. A tensor may have the parameter's name, one of its tied
/// names, or either with the prefix "model.", "transformer." or "bert." more or less, and
/// "LayerNorm.gamma" and ".beta" are "LayerNorm.weight" and ".bias"; buffers count as far
/// as they are there. Moments and step counts begin at zero. A matrix that is kept in bytes is
/// quantised from the file's values, piece by piece: of NF4 the ranks that own a part of its scales
/// read it whole, and keep 1 of 64 numbers. Collective.
///
/// Throws ConfigError on every rank, and reads nothing, if the options name no parameter, or a
/// place where its values do not lie. Throws CheckpointError on every rank, and changes nothing, if
/// files are damaged, if a tensor has another shape, if tied ones differ, or if parameters are
/// missing; it lists them. So it does with `allow_missing` where a missing one has no values to
/// keep (NamedTensors::values_follow).
PretrainedReport load_pretrained(Engine& engine, const std::string& path,
                                 const PretrainedOptions& options = {});

/// A product of two thin matrices that is added to a parameter W of two dimensions as it is
/// written: W + scale (B A), in fp32, rounded once to the dtype of W. A (rank, in) and B (out,
/// rank) are parameters, whose fp32 masters count; they are not written themselves.
struct MergedProduct {
  std::string a, b;
  double scale = 1;
  int64_t out_begin = 0, in_begin = 0;  ///< the row of B and the column of A where W begins
  bool in_out = false;                  ///< W lies as (in, out)
  /// DoRA: the parameter (out) whose elements are the lengths of the rows of the sum, of which W
  /// is the whole. Empty: they keep theirs.
  std::string magnitude{};
};

struct SavePretrainedOptions {
  /// As PretrainedOptions::places. The parameters of one tensor make it whole together. It is in
  /// memory from the first of them to the last.
  std::map<std::string, TensorPlace> places{};
  /// As PretrainedOptions::packed: they are written in the engine's dtype for parameters.
  std::map<std::string, PackedMatrix> packed{};
  /// By the names of parameters: what is added to them, before they are rounded.
  std::map<std::string, MergedProduct> merged{};
  /// The text of config.json; empty: none is written.
  std::string config_json{};
  /// A file has at most so many bytes of tensors, unless it has one tensor alone.
  int64_t shard_bytes = 5'000'000'000;
};

/// Writes the parameters, in the engine's dtype, and rank 0's buffers, as transformers'
/// save_pretrained does: `model.safetensors`, or `model-00001-of-0000N.safetensors` and their index
/// where there are more than `shard_bytes`. Rank 0 writes to the folder, which exists, with one
/// unit at a time in memory, and with the matrices of all `merged` products, in fp32. Each file is
/// whole or absent. Weights of an earlier call, which have these names, go when the new ones are
/// there. Collective. Throws ConfigError on every rank, and writes nothing, if the options name no
/// parameter, do not fit its shape, or leave a part of a tensor without values; throws
/// CheckpointError on every rank where the disk is full.
void save_pretrained(Engine& engine, const std::string& folder,
                     const SavePretrainedOptions& options = {});

}  // namespace zero
