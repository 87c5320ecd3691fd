// Ouzel: linear attention for CPUs. This header pulls in the whole public API.
#pragma once

#include "ouzel/context.h"
#include "ouzel/error.h"
#include "ouzel/evaluate.h"
#include "ouzel/feature_map.h"
#include "ouzel/generate.h"
#include "ouzel/laws.h"
#include "ouzel/linear_attention.h"
#include "ouzel/model.h"
#include "ouzel/recurrence.h"
#include "ouzel/retention.h"
#include "ouzel/segments.h"
#include "ouzel/short_conv.h"
#include "ouzel/softmax_attention.h"
#include "ouzel/tensor.h"
#include "ouzel/train.h"
#include "ouzel/version.h"
