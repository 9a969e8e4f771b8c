package session

import (
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"

	"github.com/pkg/sftp"
)

// sftp serves the subsystem: in this process for its own account, in a child
// that runs as any other, so that the kernel judges every file access.
func (s *sessionChannel) sftp() {
	srv := s.conn.srv
	account, err := srv.cfg.Accounts(s.ssh.User())
	if err != nil {
		s.fail(err)
		return
	}
	dir, _, err := srv.folder(account)
	if err != nil {
		s.fail(err)
		return
	}
	if account.Own {
		if err := ServeSFTP(s.ch, dir); err != nil && !s.conn.dead(s.ssh) {
			srv.log.Warn("sftp ended early", "err", err)
		}
		s.exit(0, "", false)
		return
	}
	if len(srv.cfg.SFTPServer) == 0 {
		s.fail(fmt.Errorf("serve sftp as %q: %w", account.Name, errors.ErrUnsupported))
		return
	}
	cmd := exec.Command(srv.cfg.SFTPServer[0], srv.cfg.SFTPServer[1:]...) //nolint:noctx,gosec // its life is the channel's; configured by us
	cmd.Dir = dir
	cmd.SysProcAttr = attributes(account)
	cmd.Env = merge([]string{"PATH=" + defaultPath}, srv.cfg.Env, accountEnv(account))
	if s.prog, err = srv.startPiped(cmd); err != nil {
		s.fail(err)
		return
	}
	s.attend()
}

// ServeSFTP serves the file system over rwc until the client's end of file;
// relative paths start at dir. It closes rwc only on failure.
func ServeSFTP(rwc io.ReadWriteCloser, dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("serve sftp: %w", err)
	}
	server, err := sftp.NewServer(rwc, sftp.WithServerWorkingDirectory(dir), sftp.WithAllocator(), sftp.WithMaxTxPacket(255<<10))
	if err != nil {
		return fmt.Errorf("serve sftp: %w", err)
	}
	if err := server.Serve(); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("serve sftp: %w", err)
	}
	return nil
}
