# `cmake --install` gives a package that find_package(zero) finds.
include(CMakePackageConfigHelpers)
install(TARGETS zero EXPORT zeroTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY zero/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/zero FILES_MATCHING PATTERN "*.h")
