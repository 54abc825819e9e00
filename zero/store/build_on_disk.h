// Building a model that is larger than memory.
//
// Note [Building on disk]
// A module's constructor makes and fills each parameter with LibTorch's own functions, which need
// its bytes in memory, and may fill it again later. So inside the scope every large tensor is
// mapped from a file. A finished tensor is written out when the next two are begun. Code that comes
// back to it finds it there, since the system pages it in. This works for any module and any way to
// initialise it, and gives the random numbers of a model that is built in memory. An Engine that is
// given the model then moves one parameter after the other to the place that its configuration
// says, and frees that parameter's part of the file (DeepSpeed's zero.Init; ZeRO-Infinity,
// 2104.07857, section 7.2).
#pragma once

#include <memory>
#include <string>

namespace zero {

class BlockRedirect;

/// While this object lives, tensors of 64 KiB and more that this thread makes lie in a file in
/// `folder`.
///
///   {
///     zero::BuildOnDisk scope("/local/nvme");
///     model = std::make_shared<MyNet>();
///   }
///   zero::Engine engine(model, ...);
///
/// The tensors may outlive the scope. The file has no name: it goes with the last of the tensors,
/// or with the process. The constructor installs libzero's host allocator (install_host_allocator).
class BuildOnDisk {
 public:
  /// Throws StoreError if no file can be made in `folder`. Making a tensor throws StoreError if the
  /// disk is full or could not write an earlier tensor; so does an Engine that takes the tensors
  /// over.
  explicit BuildOnDisk(const std::string& folder);
  ~BuildOnDisk();
  BuildOnDisk(const BuildOnDisk&) = delete;
  BuildOnDisk& operator=(const BuildOnDisk&) = delete;

 private:
  std::unique_ptr<BlockRedirect> redirect_;
};

}  // namespace zero
