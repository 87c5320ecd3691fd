/* Ouzel's C ABI: every operator of the table by name, models, states and generation.
 *
 * Errors. Functions that can fail return a status; the sentence that says what was expected, what
 * was found and the remedy is ouzel_last_error() of the same thread. No exception crosses.
 * Functions that return no status cannot fail; their handle must not be NULL.
 *
 * Memory. What a create, copy or load function gives belongs to the caller, who gives it back to
 * the destroy function of its kind (NULL is allowed there). Tensors, tokens, logits and texts are
 * the caller's memory, used only during the call; the library keeps no pointer to them, but to a
 * context's callback and its `user`. Strings that are returned belong to the library.
 *
 * Sizes. Neither a tensor nor the distance between two of its elements may be larger than 2^63
 * bytes, with or without elements.
 *
 * Threads. A context serves one thread at a time, and so does a generator with its context; several
 * contexts may run at once. A model is immutable: any number of threads may share it. A state may
 * be read by many threads or changed by one. A generator refers to the context that it was created
 * with, which must outlive it; a model may be destroyed while states and generators of it live.
 *
 * Versions. Every struct begins with its size: set it to sizeof the struct. Members that a later
 * version adds behind are zero, their default, for a program that was compiled before.
 */
#pragma once

#define OUZEL_C_H

#include <stddef.h>
#include <stdint.h>

#include "ouzel/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t ouzel_status;
enum {
  OUZEL_OK = 0,
  OUZEL_INVALID_ARGUMENT = 1, /* a shape, name or value that cannot be taken */
  OUZEL_BAD_FILE = 2,         /* a file whose content is damaged or of another kind */
  OUZEL_IO = 3,               /* the operating system refused to open, read or write */
  OUZEL_OUT_OF_MEMORY = 4,
  OUZEL_CANCELLED = 5, /* the context's callback said so */
  OUZEL_INTERNAL = 6   /* a fault of the library */
};

/* The sentence of this thread's last failure, "" before there was one; valid until the next. UTF-8:
 * other bytes of names and texts that it quotes stand as \xNN. */
OUZEL_EXPORT const char* ouzel_last_error(void);
OUZEL_EXPORT const char* ouzel_version(void);

/* --- contexts: threads, instruction set, scratch memory */

typedef struct ouzel_context ouzel_context;

typedef struct ouzel_context_options {
  size_t size;
  int32_t threads; /* 0: OUZEL_THREADS if set, else all that are free */
  const char* isa; /* "avx512", "avx2", "portable"; NULL: OUZEL_ISA if set, else the best */
  /* Asked on the calling thread, at least once in a call that computes anything and every few
   * milliseconds; other than 0 ends it with OUZEL_CANCELLED, on all threads. Results are then
   * unspecified, and so are states that the call advances: models' states, and an initial state
   * whose memory is the final state's. It may make calls with other contexts, not with this one.
   * NULL: never. */
  int32_t (*cancelled)(void* user);
  void* user;
} ouzel_context_options;

/* `options` may be NULL: the defaults. */
OUZEL_EXPORT ouzel_status ouzel_context_create(const ouzel_context_options* options,
                                               ouzel_context** context);
OUZEL_EXPORT void ouzel_context_destroy(ouzel_context* context);
OUZEL_EXPORT int32_t ouzel_context_threads(const ouzel_context* context);
OUZEL_EXPORT const char* ouzel_context_isa(const ouzel_context* context);

/* --- operators */

typedef int32_t ouzel_dtype;
enum { OUZEL_F32 = 0, OUZEL_F64 = 1, OUZEL_BF16 = 2, OUZEL_F16 = 3 };
enum { OUZEL_MAX_RANK = 8 };

typedef struct ouzel_tensor {
  size_t size;
  const char* name; /* as `ouzel attend --list` shows it: q, k, v, initial_state, o, dq, ... */
  void* data;
  ouzel_dtype dtype;
  int32_t rank;
  int64_t shape[OUZEL_MAX_RANK];
  /* In elements, may be negative or, of inputs, 0; all 0: dense. A last stride other than 1 costs a
   * copy. */
  int64_t strides[OUZEL_MAX_RANK];
} ouzel_tensor;

typedef struct ouzel_call {
  size_t size;
  const char* op; /* "retention" */
  /* Names and values in turns, each name once, then NULL: {"scale", "0.25", "cu_seqlens",
   * "0,17,52", NULL}. NULL: none. */
  const char* const* attributes;
  /* The operator's inputs and, for gradients, those of its outputs that come from above. */
  const ouzel_tensor* inputs;
  size_t input_count;
  /* What is wanted: outputs and gradients of inputs, the latter assigned. float32, bfloat16 or
   * float16. The memory must not overlap that of other tensors, except that a final state may be
   * its initial state: dense tensors that overlap are refused, those with gaps are not looked at
   * (gradients of q, k and v may stand beside each other in one array). */
  ouzel_tensor* results;
  size_t result_count;
} ouzel_call;

OUZEL_EXPORT size_t ouzel_operator_count(void);
/* NULL for an index that is too large. */
OUZEL_EXPORT const char* ouzel_operator_name(size_t index);

/* Sets dtype, rank, shape and strides (dense) of the results named in `call`, from its inputs;
 * reads no memory of tensors. For who has to allocate them. The first output has the type of the
 * first input and a gradient that of its input; states are float32. */
OUZEL_EXPORT ouzel_status ouzel_infer_results(const ouzel_call* call);
/* Computes the results. */
OUZEL_EXPORT ouzel_status ouzel_run(ouzel_context* context, const ouzel_call* call);

enum {
  OUZEL_NORMS_CHI = 0, /* rows as long as Gaussian ones: unbiased */
  OUZEL_NORMS_SQRT = 1 /* all keys^0.5 */
};
/* Fills `w`, dense float32 [rows, keys], with the random projection of FAVOR+: Gaussian rows,
 * orthogonal to each other within blocks of `keys`. The same numbers for the same seed, anywhere.
 */
OUZEL_EXPORT ouzel_status ouzel_draw_orthogonal_projection(uint64_t seed, int32_t norms,
                                                           int64_t rows, int64_t keys, float* w);

/* --- models and states */

typedef struct ouzel_model ouzel_model;
typedef struct ouzel_state ouzel_state;

/* FOLDER/config.json and its safetensors. */
OUZEL_EXPORT ouzel_status ouzel_model_load(ouzel_context* context, const char* folder,
                                           ouzel_model** model);
OUZEL_EXPORT void ouzel_model_destroy(ouzel_model* model);
OUZEL_EXPORT int64_t ouzel_model_vocab_size(const ouzel_model* model);
/* Of configuration and weights, 16 hexadecimal digits. */
OUZEL_EXPORT const char* ouzel_model_fingerprint(const ouzel_model* model);

/* Processes tokens [batch, tokens]. Row n continues states[n], one of its own, which is advanced;
 * `states` may be NULL: all rows start from zero and nothing is kept. `logits`: float32 [batch,
 * vocab_size] of each row's last token, or with every_token != 0 [batch, tokens, vocab_size]. */
OUZEL_EXPORT ouzel_status ouzel_model_forward(const ouzel_model* model, ouzel_context* context,
                                              const int32_t* token_ids, int64_t batch,
                                              int64_t tokens, ouzel_state* const* states,
                                              int32_t every_token, float* logits);
/* One token of one sequence; `logits`: [vocab_size]. */
OUZEL_EXPORT ouzel_status ouzel_model_step(const ouzel_model* model, ouzel_context* context,
                                           int32_t token_id, ouzel_state* state, float* logits);

/* The zero state. `capacity`: tokens that softmax layers without a window have room for, 0 or more;
 * other models need none. */
OUZEL_EXPORT ouzel_status ouzel_state_create(const ouzel_model* model, int64_t capacity,
                                             ouzel_state** state);
OUZEL_EXPORT ouzel_status ouzel_state_copy(const ouzel_state* state, ouzel_state** copy);
/* OUZEL_BAD_FILE when the file is of another model or format. */
OUZEL_EXPORT ouzel_status ouzel_state_load(const ouzel_model* model, const char* path,
                                           int64_t capacity, ouzel_state** state);
/* One file, written whole or not at all. */
OUZEL_EXPORT ouzel_status ouzel_state_save(const ouzel_state* state, const char* path);
OUZEL_EXPORT void ouzel_state_destroy(ouzel_state* state);
/* *equal is 1 for the same model, position, sampler and content, else 0. */
OUZEL_EXPORT ouzel_status ouzel_state_equal(const ouzel_state* a, const ouzel_state* b,
                                            int32_t* equal);
/* Grows the capacity to 0 or more tokens, never shrinks it. */
OUZEL_EXPORT ouzel_status ouzel_state_reserve(ouzel_state* state, int64_t tokens);
OUZEL_EXPORT int64_t ouzel_state_capacity(const ouzel_state* state);
OUZEL_EXPORT int64_t ouzel_state_position(const ouzel_state* state); /* tokens seen */
OUZEL_EXPORT size_t ouzel_state_bytes(const ouzel_state* state);     /* of memory */

/* --- generation: a stream of bytes through a model whose tokens are bytes */

typedef struct ouzel_generator ouzel_generator;

typedef struct ouzel_sampling {
  size_t size;
  double temperature; /* 0: the most likely token */
  int64_t top_k;      /* 0: all */
  double top_p;
  double min_p;
  double repetition_penalty; /* 1: none */
  int64_t repetition_window;
  uint64_t seed;
  const char* const* stop; /* texts that end the generation, then NULL; NULL: none */
} ouzel_sampling;

/* Sets all members to the defaults; `size` must be set. */
OUZEL_EXPORT ouzel_status ouzel_sampling_defaults(ouzel_sampling* sampling);

/* Goes on from a copy of `state`, NULL: from zero. `sampling` NULL: the options that the state was
 * saved with, or the defaults. */
OUZEL_EXPORT ouzel_status ouzel_generator_create(ouzel_context* context, const ouzel_model* model,
                                                 const ouzel_state* state,
                                                 const ouzel_sampling* sampling,
                                                 ouzel_generator** generator);
OUZEL_EXPORT void ouzel_generator_destroy(ouzel_generator* generator);
/* Appends to the prompt. */
OUZEL_EXPORT ouzel_status ouzel_generator_read(ouzel_generator* generator, const char* text,
                                               size_t bytes);

/* Told the text that is certain after each token, perhaps none; 0 ends the call. It may ask for the
 * generator's state and position, and must not destroy it; reading or generating with it is refused
 * (OUZEL_INVALID_ARGUMENT). */
typedef int32_t (*ouzel_write)(void* user, const char* text, size_t bytes);
enum {
  OUZEL_FINISH_LENGTH = 0,  /* all tokens that were asked for */
  OUZEL_FINISH_STOP = 1,    /* a stop text */
  OUZEL_FINISH_CALLBACK = 2 /* `write` said so */
};
/* `finish` may be NULL. */
OUZEL_EXPORT ouzel_status ouzel_generator_generate(ouzel_generator* generator, int64_t tokens,
                                                   ouzel_write write, void* user, int32_t* finish);
/* A copy of all that is needed to go on. */
OUZEL_EXPORT ouzel_status ouzel_generator_state(const ouzel_generator* generator,
                                                ouzel_state** state);
OUZEL_EXPORT int64_t ouzel_generator_position(const ouzel_generator* generator); /* tokens */

#ifdef __cplusplus
}
#endif
