//go:build !race

package tunnel

const raceFactor = 1
