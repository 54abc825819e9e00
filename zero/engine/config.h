// The engine's configuration, where users have included it from.
#pragma once

#include "zero/config/config.h"
