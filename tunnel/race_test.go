//go:build race

package tunnel

// raceFactor is what the race detector makes large tests smaller by.
const raceFactor = 10
