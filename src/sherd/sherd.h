#pragma once
// Umbrella header; completed with the engine.
