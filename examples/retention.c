/* An operator from C: retention over a sequence in two halves, the state carrying the first half's
 * sums into the second, then the gradients of the whole. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <ouzel/c.h>

enum { kTokens = 128, kHeads = 2, kSize = 16, kRow = kHeads * kSize };

static float q[kTokens * kRow], k[kTokens * kRow], v[kTokens * kRow];
static float whole[kTokens * kRow], halves[kTokens * kRow];
static float state[kRow * kSize];
static float d_o[kTokens * kRow], d_q[kTokens * kRow];

/* Tokens from `first` on of a [1, kTokens, kHeads, kSize] array. */
static ouzel_tensor rows(const char* name, float* data, int first, int tokens) {
  ouzel_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  tensor.size = sizeof(tensor);
  tensor.name = name;
  tensor.data = data + first * kRow;
  tensor.dtype = OUZEL_F32;
  tensor.rank = 4;
  tensor.shape[0] = 1;
  tensor.shape[1] = tokens;
  tensor.shape[2] = kHeads;
  tensor.shape[3] = kSize;
  return tensor;
}

static ouzel_tensor state_tensor(const char* name) {
  ouzel_tensor tensor = rows(name, state, 0, kHeads);
  tensor.shape[2] = tensor.shape[3] = kSize;
  return tensor;
}

static ouzel_status attend(ouzel_context* context, ouzel_tensor* inputs, size_t input_count,
                           ouzel_tensor* results, size_t result_count) {
  const char* const attributes[] = {"scale", "0.25", NULL};
  ouzel_call call;
  memset(&call, 0, sizeof(call));
  call.size = sizeof(call);
  call.op = "retention";
  call.attributes = attributes;
  call.inputs = inputs;
  call.input_count = input_count;
  call.results = results;
  call.result_count = result_count;
  return ouzel_run(context, &call);
}

static int failed(void) {
  fprintf(stderr, "retention: %s\n", ouzel_last_error());
  return 1;
}

int main(void) {
  ouzel_context* context = NULL;
  ouzel_tensor inputs[4], results[2];
  int i;

  for (i = 0; i < kTokens * kRow; ++i) {
    q[i] = (float)sin(i);
    k[i] = (float)cos(1.3 * i);
    v[i] = (float)sin(0.7 * i);
    d_o[i] = 1;
  }
  if (ouzel_context_create(NULL, &context) != OUZEL_OK) return failed();

  inputs[0] = rows("q", q, 0, kTokens);
  inputs[1] = rows("k", k, 0, kTokens);
  inputs[2] = rows("v", v, 0, kTokens);
  results[0] = rows("o", whole, 0, kTokens);
  if (attend(context, inputs, 3, results, 1) != OUZEL_OK) return failed();

  for (i = 0; i < kTokens; i += kTokens / 2) {
    inputs[0] = rows("q", q, i, kTokens / 2);
    inputs[1] = rows("k", k, i, kTokens / 2);
    inputs[2] = rows("v", v, i, kTokens / 2);
    inputs[3] = state_tensor("initial_state");
    results[0] = rows("o", halves, i, kTokens / 2);
    results[1] = state_tensor("final_state"); /* may be the memory of the initial one */
    if (attend(context, inputs, 4, results, 2) != OUZEL_OK) return failed();
  }

  /* A gradient that is asked for makes it a backward call. */
  inputs[0] = rows("q", q, 0, kTokens);
  inputs[1] = rows("k", k, 0, kTokens);
  inputs[2] = rows("v", v, 0, kTokens);
  inputs[3] = rows("do", d_o, 0, kTokens);
  results[0] = rows("dq", d_q, 0, kTokens);
  if (attend(context, inputs, 4, results, 1) != OUZEL_OK) return failed();

  printf("o of the last token, first head: %.6f\n", whole[(kTokens - 1) * kRow]);
  printf("the same from two halves:        %.6f\n", halves[(kTokens - 1) * kRow]);
  printf("its gradient by q:               %.6f\n", d_q[(kTokens - 1) * kRow]);

  /* What is wrong is said in a sentence. */
  inputs[1].shape[3] = kSize / 2;
  if (attend(context, inputs, 4, results, 1) != OUZEL_INVALID_ARGUMENT) return 1;
  printf("an error: %s\n", ouzel_last_error());

  ouzel_context_destroy(context);
  /* The split is a multiple of 64 tokens: the same bits. */
  return memcmp(whole, halves, sizeof(whole)) == 0 ? 0 : 1;
}
