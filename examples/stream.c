/* Streams from a trained model, from C; the saved state goes on in the same way.
 * usage: stream FOLDER PROMPT STATE_FILE */
#include <stdio.h>
#include <string.h>

#include <ouzel/c.h>

enum { kTokens = 100 };

typedef struct Text {
  char bytes[kTokens + 1];
  size_t length;
} Text;

static int32_t append(void* user, const char* text, size_t bytes) {
  Text* to = user;
  if (bytes > kTokens - to->length) return 0;
  memcpy(to->bytes + to->length, text, bytes);
  to->length += bytes;
  return 1;
}

static int failed(void) {
  fprintf(stderr, "stream: %s\n", ouzel_last_error());
  return 1;
}

int main(int argc, char** argv) {
  ouzel_context* context = NULL;
  ouzel_model* model = NULL;
  ouzel_state *state = NULL, *loaded = NULL;
  ouzel_generator *generator = NULL, *again = NULL;
  ouzel_sampling sampling;
  Text first, second;
  int32_t equal = 0;

  if (argc != 4) {
    fprintf(stderr, "usage: stream FOLDER PROMPT STATE_FILE\n");
    return 2;
  }
  memset(&first, 0, sizeof(first));
  memset(&second, 0, sizeof(second));
  sampling.size = sizeof(sampling);
  if (ouzel_sampling_defaults(&sampling) != OUZEL_OK) return failed();
  sampling.temperature = 0.7;

  if (ouzel_context_create(NULL, &context) != OUZEL_OK ||
      ouzel_model_load(context, argv[1], &model) != OUZEL_OK ||
      ouzel_generator_create(context, model, NULL, &sampling, &generator) != OUZEL_OK ||
      ouzel_generator_read(generator, argv[2], strlen(argv[2])) != OUZEL_OK ||
      ouzel_generator_state(generator, &state) != OUZEL_OK ||
      ouzel_state_save(state, argv[3]) != OUZEL_OK ||
      ouzel_generator_generate(generator, kTokens, append, &first, NULL) != OUZEL_OK) {
    return failed();
  }
  printf("%s%s\n", argv[2], first.bytes);

  /* The sampling options are in the state. */
  if (ouzel_state_load(model, argv[3], 0, &loaded) != OUZEL_OK ||
      ouzel_state_equal(state, loaded, &equal) != OUZEL_OK ||
      ouzel_generator_create(context, model, loaded, NULL, &again) != OUZEL_OK ||
      ouzel_generator_generate(again, kTokens, append, &second, NULL) != OUZEL_OK) {
    return failed();
  }

  ouzel_generator_destroy(again);
  ouzel_generator_destroy(generator);
  ouzel_state_destroy(loaded);
  ouzel_state_destroy(state);
  ouzel_model_destroy(model);
  ouzel_context_destroy(context);
  return equal == 1 && strcmp(first.bytes, second.bytes) == 0 ? 0 : 1;
}
