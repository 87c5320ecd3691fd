// Contexts, and the sentence of the last failure.
#include "src/capi/handles.h"

#include <utility>

#include "ouzel/version.h"
#include "src/base/text.h"

namespace ouzel::capi {
namespace {

thread_local std::string sentence_of_thread;

}  // namespace

ouzel_status fail(ouzel_status status, const char* sentence) noexcept {
  try {
    sentence_of_thread = printable_lines(sentence);  // names of files need not be UTF-8
  } catch (...) {
    sentence_of_thread.clear();  // no memory for the sentence: the code has to do
  }
  return status;
}

}  // namespace ouzel::capi

using namespace ouzel::capi;

const char* ouzel_last_error(void) { return sentence_of_thread.c_str(); }
const char* ouzel_version(void) { return ouzel::version(); }

ouzel_status ouzel_context_create(const ouzel_context_options* options, ouzel_context** context) {
  return guarded([&] {
    required(context, "the context") = nullptr;
    ouzel::ContextOptions chosen;
    if (options != nullptr) {
      const ouzel_context_options given = versioned(*options, "ouzel_context_options");
      chosen.threads = given.threads;
      if (given.isa != nullptr) chosen.isa = ouzel::isa_from_name(given.isa);
      if (given.cancelled != nullptr) {
        chosen.cancelled = [cancelled = given.cancelled, user = given.user] {
          return cancelled(user) != 0;
        };
      }
    }
    *context = new ouzel_context{ouzel::Context(std::move(chosen)), {}};
  });
}

void ouzel_context_destroy(ouzel_context* context) { delete context; }
int32_t ouzel_context_threads(const ouzel_context* context) { return context->context.threads(); }
const char* ouzel_context_isa(const ouzel_context* context) {
  return ouzel::name_of(context->context.isa());
}
