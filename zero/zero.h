// Everything that a program which trains with libzero needs.
#pragma once

#include "zero/base/error.h"
#include "zero/base/ledger.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/comm/group.h"
#include "zero/config/config.h"
#include "zero/config/settings.h"
#include "zero/engine/engine.h"
#include "zero/engine/gathered.h"
#include "zero/engine/tiers.h"
#include "zero/models/layers/tiled_linear.h"
#include "zero/models/recompute/recompute.h"
#include "zero/optim/loss_scaler.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/schedule.h"
#include "zero/store/build_on_disk.h"
#include "zero/train/layer_major.h"
