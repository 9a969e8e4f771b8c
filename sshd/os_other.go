//go:build !unix

package sshd

import "io/fs"

// modeCounts says that permission bits mean nothing on this system: the
// access list of the user's profile folder protects what is in it.
const modeCounts = false

// syncFolder does nothing: a folder cannot be synced on this system.
func syncFolder(string) error { return nil }

// giveTo does nothing: a file belongs to the folder's owner here.
func giveTo(string, fs.FileInfo) error { return nil }
