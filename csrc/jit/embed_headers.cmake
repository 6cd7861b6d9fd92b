# embed_headers(TARGET ROOT FILES...) compiles the texts of FILES into TARGET, as declared in csrc/jit/nvrtc.h. Kernels
# include a file by its path from ROOT, and those in a folder `std` (stand-ins for the standard library's headers, which
# NVRTC does not have) by their name alone.
#
# With cmake -P, writes the table itself: cmake -DOUTPUT=... -DROOT=... -DFILES=... -P embed_headers.cmake
if(CMAKE_SCRIPT_MODE_FILE)
  set(names "")
  set(texts "")
  set(count 0)
  string(REPLACE "|" ";" FILES "${FILES}")
  foreach(file IN LISTS FILES)
    file(READ "${ROOT}/${file}" text)
    string(REGEX REPLACE "^(.*/)?std/" "" name "${file}")
    string(APPEND names "    \"${name}\",\n")
    string(APPEND texts "    R\"embedded(${text})embedded\",\n")
    math(EXPR count "${count} + 1")
  endforeach()
  file(WRITE "${OUTPUT}" "#include \"jit/nvrtc.h\"

namespace jax_softmax::jit {

const char* const kHeaderNames[] = {
${names}};
const char* const kHeaderTexts[] = {
${texts}};
const int kHeaders = ${count};

}  // namespace jax_softmax::jit
")
  return()
endif()

set(embed_headers_script "${CMAKE_CURRENT_LIST_FILE}")

function(embed_headers target root)
  set(output "${CMAKE_CURRENT_BINARY_DIR}/embedded_headers.cc")
  list(TRANSFORM ARGN PREPEND "${root}/" OUTPUT_VARIABLE inputs)
  list(JOIN ARGN "|" files)  # a list would not survive the command line
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${CMAKE_COMMAND}" "-DOUTPUT=${output}" "-DROOT=${root}" "-DFILES=${files}" -P "${embed_headers_script}"
    DEPENDS ${inputs} "${embed_headers_script}"
    VERBATIM)
  target_sources(${target} PRIVATE "${output}")
endfunction()
