// Package helix holds the files that are compiled into the helix program.
package helix

import _ "embed"

// Caddyfile is the template of the one HTTP configuration of a gateway. The
// web room of the gateway renders it once, at start.
//
//go:embed Caddyfile.tmpl
var Caddyfile string
