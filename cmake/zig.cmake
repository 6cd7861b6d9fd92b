# The compiler of published wheels: zig's clang, which brings glibc's symbols up to a version and links libc++ in. So
# the compiled code needs the same glibc wherever it was built, for either architecture.
set(arch $ENV{JAX_SOFTMAX_WHEEL_ARCH})
find_program(zig python-zig REQUIRED)
set(CMAKE_CXX_COMPILER "${zig}" c++ -target ${arch}-linux-gnu.2.28)
set(CMAKE_CXX_ARCHIVE_CREATE "${zig} ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "${zig} ranlib <TARGET>")
# nanobind uses stdio.h, which libc++'s headers do not include. Python's headers define macros of C's headers again.
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h -Wno-macro-redefined")
set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
set(CMAKE_STRIP "")
cmake_host_system_information(RESULT host QUERY OS_PLATFORM)
if(NOT arch STREQUAL host)
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR ${arch})
endif()
