// Building a model that is larger than memory.
//
// Note [Building on disk]
// A module's constructor makes and fills each parameter with LibTorch's own functions, which want
// its bytes to be there, and may fill it again later. So inside the scope every large tensor is
// mapped from a file: a finished one is written out when the next two are begun, and whatever comes
// back to it finds it there, by the system's paging. Any module, any way of initialising it, and
// the random numbers of a model built in memory. An Engine that is given the model then takes one
// parameter after the other to where its configuration puts it, and gives its part of the file back
// (DeepSpeed's zero.Init; ZeRO-Infinity, 2104.07857, section 7.2).
#pragma once

#include <memory>
#include <string>

namespace zero {

class BlockRedirect;

/// While it lives, tensors of 64 KiB and more that this thread makes lie in a file in `folder`.
///
///   {
///     zero::BuildOnDisk scope("/local/nvme");
///     model = std::make_shared<MyNet>();
///   }
///   zero::Engine engine(model, ...);
///
/// The tensors may outlive the scope. The file has no name: it goes with the last of them, or with
/// the process. Installs libzero's host allocator (install_host_allocator).
class BuildOnDisk {
 public:
  /// Throws StoreError where no file can be made in `folder`. Making a tensor throws it where the
  /// disk is full, or could not write an earlier one; so does an Engine that takes the tensors
  /// over.
  explicit BuildOnDisk(const std::string& folder);
  ~BuildOnDisk();
  BuildOnDisk(const BuildOnDisk&) = delete;
  BuildOnDisk& operator=(const BuildOnDisk&) = delete;

 private:
  std::unique_ptr<BlockRedirect> redirect_;
};

}  // namespace zero
