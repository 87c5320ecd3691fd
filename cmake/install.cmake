# `cmake --install`: headers, shared library, CMake package, pkg-config file, program, its man
# page and completions.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(DIRECTORY include/ouzel DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(TARGETS ouzel EXPORT ouzelTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS ouzel_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

# The program writes its own manual.
add_custom_command(OUTPUT ouzel.1 ouzel.bash
                   COMMAND ouzel_program --man > ouzel.1
                   COMMAND ouzel_program --completion-bash > ouzel.bash
                   DEPENDS ouzel_program VERBATIM)
add_custom_target(ouzel_manual ALL DEPENDS ouzel.1 ouzel.bash)
install(FILES ${PROJECT_BINARY_DIR}/ouzel.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${PROJECT_BINARY_DIR}/ouzel.bash RENAME ouzel
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)

set(OUZEL_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/ouzel)
# Where find_package does not look: a build folder in PATH is no package.
set(OUZEL_PACKAGE_FILES ${PROJECT_BINARY_DIR}/package_files)
install(EXPORT ouzelTargets NAMESPACE ouzel:: DESTINATION ${OUZEL_PACKAGE_DIR})
configure_package_config_file(cmake/ouzelConfig.cmake.in ${OUZEL_PACKAGE_FILES}/ouzelConfig.cmake
                              INSTALL_DESTINATION ${OUZEL_PACKAGE_DIR})
write_basic_package_version_file(${OUZEL_PACKAGE_FILES}/ouzelConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${OUZEL_PACKAGE_FILES}/ouzelConfig.cmake ${OUZEL_PACKAGE_FILES}/ouzelConfigVersion.cmake
        DESTINATION ${OUZEL_PACKAGE_DIR})

# Written at installation, when the prefix is known (`cmake --install --prefix` may change it).
install(CODE "
  set(PROJECT_VERSION \"${PROJECT_VERSION}\")
  set(PROJECT_DESCRIPTION \"${PROJECT_DESCRIPTION}\")
  set(CMAKE_INSTALL_LIBDIR \"${CMAKE_INSTALL_LIBDIR}\")
  set(CMAKE_INSTALL_INCLUDEDIR \"${CMAKE_INSTALL_INCLUDEDIR}\")
  configure_file(\"${PROJECT_SOURCE_DIR}/cmake/ouzel.pc.in\"
                 \"${PROJECT_BINARY_DIR}/ouzel.pc\" @ONLY)
")
install(FILES ${PROJECT_BINARY_DIR}/ouzel.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
