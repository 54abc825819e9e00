# `cmake --install` gives a package that find_package(zero) finds. The prefix may be moved; LibTorch stays where it is.
include(CMakePackageConfigHelpers)
set(ZERO_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/zero)

# The library finds LibTorch, and the program the library beside it, without LD_LIBRARY_PATH.
file(RELATIVE_PATH bin_to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
set_target_properties(zero PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
set_target_properties(zero_program PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON INSTALL_RPATH $ORIGIN/${bin_to_lib})
install(TARGETS zero EXPORT zeroTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT zeroTargets NAMESPACE zero:: DESTINATION ${ZERO_CMAKE_DIR})

# Public are these headers and what they include, directly or not. The set is found at install time. Those beside the umbrella are
# left out of it because they cost torch/torch.h, or because few programs want them.
install(CODE "set(source \"${CMAKE_CURRENT_SOURCE_DIR}\")
set(destination \"${CMAKE_INSTALL_INCLUDEDIR}\")
set(headers zero/zero.h zero/base/host_allocator.h zero/comm/through_host.h zero/data/example.h zero/data/prepare.h zero/data/token_loader.h zero/data/tokenizer.h zero/engine/plain.h
    zero/engine/zero_redundancy_optimizer.h zero/models/gpt2/gpt2.h zero/optim/schedule.h zero/report/run_report.h zero/train/generate_texts.h zero/train/loaded_model.h)")
install(SCRIPT cmake/InstallHeaders.cmake)

# A program linked to libzero must use the LibTorch release that libzero was built with: its C++ interface changes between releases.
configure_package_config_file(cmake/zeroConfig.cmake.in ${CMAKE_BINARY_DIR}/cmake/zeroConfig.cmake INSTALL_DESTINATION ${ZERO_CMAKE_DIR}
                              NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/cmake/zeroConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/cmake/zeroConfig.cmake ${CMAKE_BINARY_DIR}/cmake/zeroConfigVersion.cmake cmake/FindLibTorch.cmake
        DESTINATION ${ZERO_CMAKE_DIR})
