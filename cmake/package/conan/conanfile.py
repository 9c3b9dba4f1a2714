"""Sherd for conan 2, from the source tarball beside this file and the system's libraries: nothing is downloaded.

  scripts/setup, or its packages, first; then
  conan create . --build=missing
"""
import os

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import rmdir, unzip
from conan.tools.system.package_manager import Apt


class Sherd(ConanFile):
    name = "sherd"
    version = "@version@"
    description = "Sharded, offloaded and parallel training of large transformer models"
    license = "Apache-2.0"
    topics = ("deep-learning", "transformers", "distributed-training", "zero")
    settings = "os", "arch", "compiler", "build_type"
    options = {"with_mpi": [True, False], "with_cuda": [True, False]}
    default_options = {"with_mpi": False, "with_cuda": False}
    package_type = "static-library"
    exports_sources = "sherd.tar.xz"

    def system_requirements(self):
        packages = ["libtbb-dev", "libdnnl-dev", "libeigen3-dev", "libsentencepiece-dev", "libcxxopts-dev",
                    "nlohmann-json3-dev", "liburing-dev", "zlib1g-dev", "libzstd-dev", "libpcre2-dev", "libicu-dev",
                    "pkg-config"]
        if self.options.with_mpi:
            packages.append("libopenmpi-dev")
        Apt(self).install(packages, check=True)

    def source(self):
        unzip(self, os.path.join(self.export_sources_folder, "sherd.tar.xz"), strip_root=True)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for name in ("TESTS", "BENCH", "EXAMPLES"):
            toolchain.cache_variables[f"SHERD_BUILD_{name}"] = False
        toolchain.cache_variables["SHERD_WITH_MPI"] = bool(self.options.with_mpi)
        toolchain.cache_variables["SHERD_WITH_CUDA"] = bool(self.options.with_cuda)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        rmdir(self, os.path.join(self.package_folder, "share", "bash-completion"))

    def package_info(self):
        # The CMake package that Sherd installs knows the system's libraries.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append(os.path.join("lib", "cmake", "Sherd"))
        self.buildenv_info.append_path("PATH", os.path.join(self.package_folder, "bin"))
        self.runenv_info.append_path("PATH", os.path.join(self.package_folder, "bin"))
